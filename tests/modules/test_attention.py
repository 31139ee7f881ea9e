"""The contract that every registered variant keeps."""

import dataclasses

import pytest
import torch
from torch import Tensor

from longhaul.kernels import symmetric_dim
from longhaul.modules.attention import (
    Attention,
    attention_config,
    build_attention,
    registered_variants,
)

VARIANTS = registered_variants()
LINEAR = [kind for kind in VARIANTS if attention_config(kind).cost == "linear"]
WIDTH, HEADS = 16, 2


def build(kind: str, **options: object) -> Attention:
    """A float64 module with parameters large enough for every part to matter."""
    torch.manual_seed(0)
    attention = build_attention(kind, WIDTH, HEADS, **options).double()
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.normal_(std=0.5)
    return attention


def tokens(T: int, batch: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(T)
    return torch.randn(batch, T, WIDTH, dtype=torch.float64, generator=generator)


def assert_same(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("kind", VARIANTS)
def test_changing_a_token_changes_nothing_before_it(kind: str) -> None:
    attention, x = build(kind), tokens(63)
    before, _ = attention(x, keep_state=False)
    changed = x.clone()
    changed[:, 40:] += 1
    after, _ = attention(changed, keep_state=False)
    assert torch.equal(before[:, :40], after[:, :40])
    assert not torch.equal(before[:, 40:], after[:, 40:])


@pytest.mark.parametrize("T", [1, 63, 100])
@pytest.mark.parametrize("kind", VARIANTS)
def test_forward_applies_the_mixing_matrix(kind: str, T: int) -> None:
    attention, x = build(kind), tokens(T)
    weights = attention.weights(x)
    assert weights.shape == (2, HEADS, T, T)
    mixed = torch.einsum("bhti,bihv->bthv", weights, attention.values(x))
    wanted = attention.read_out(x, mixed)
    assert_same(attention(x, keep_state=False)[0], wanted)


@pytest.mark.parametrize("split", [1, 50, 99])
@pytest.mark.parametrize("kind", VARIANTS)
def test_state_carries_over_any_split(kind: str, split: int) -> None:
    attention, x = build(kind), tokens(100)
    whole, _ = attention(x)
    first, state = attention(x[:, :split])
    second, _ = attention(x[:, split:], state)
    assert_same(torch.cat([first, second], 1), whole)


@pytest.mark.parametrize("kind", VARIANTS)
def test_steps_continue_a_prefill(kind: str) -> None:
    attention, x = build(kind), tokens(40)
    whole, _ = attention(x)
    y, state = attention(x[:, :30])
    outputs = [y]
    for t in range(30, 40):
        y, state = attention.step(x[:, t : t + 1], state)
        outputs.append(y)
    assert_same(torch.cat(outputs, 1), whole)


@pytest.mark.parametrize("kind", VARIANTS)
def test_packed_documents_are_separate(kind: str) -> None:
    attention, x = build(kind), tokens(100, batch=1)
    packed, _ = attention(x, cu_seqlens=torch.tensor([0, 1, 64, 100]), keep_state=False)
    parts = [attention(part, keep_state=False)[0] for part in x.split([1, 63, 36], dim=1)]
    assert_same(packed, torch.cat(parts, 1))


@pytest.mark.parametrize("kind", VARIANTS)
def test_batch_rows_are_independent(kind: str) -> None:
    attention, x = build(kind), tokens(63, batch=3)
    whole, _ = attention(x, keep_state=False)
    for row in range(3):
        assert_same(attention(x[row : row + 1], keep_state=False)[0], whole[row : row + 1])


@pytest.mark.parametrize("kind", LINEAR)
def test_chunk_size_changes_nothing(kind: str) -> None:
    x = tokens(100)
    outputs = [build(kind, chunk_size=size)(x, keep_state=False)[0] for size in (16, 64, None)]
    assert_same(outputs[0], outputs[2])
    assert_same(outputs[1], outputs[2])


@pytest.mark.parametrize("kind", VARIANTS)
def test_gradients_equal_those_through_the_mixing_matrix(kind: str) -> None:
    attention, x = build(kind), tokens(63).requires_grad_()
    parameters = [x, *attention.parameters()]
    probe = torch.randn(2, 63, WIDTH, dtype=torch.float64)
    found = torch.autograd.grad((attention(x, keep_state=False)[0] * probe).sum(), parameters)
    mixed = torch.einsum("bhti,bihv->bthv", attention.weights(x), attention.values(x))
    wanted = torch.autograd.grad((attention.read_out(x, mixed) * probe).sum(), parameters)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("kind", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_output_has_the_dtype_of_the_input(kind: str, dtype: torch.dtype) -> None:
    attention = build(kind).to(dtype)
    y, _ = attention(tokens(20).to(dtype))
    assert y.dtype == dtype
    assert y.isfinite().all()


@pytest.mark.parametrize("kind", VARIANTS)
def test_builds_on_meta_without_memory(kind: str) -> None:
    with torch.device("meta"):
        attention = build_attention(kind, 768, 12)
    assert all(parameter.is_meta for parameter in attention.parameters())


@pytest.mark.parametrize("kind", VARIANTS)
def test_config_names_its_kind_and_is_frozen(kind: str) -> None:
    config = attention_config(kind)()
    assert config.kind == kind
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.kind = "other"  # type: ignore[misc]


def test_state_size_is_the_mathematical_one() -> None:
    # 12 layers of 12 heads of 64 in half precision: the 39 MB and 14 GB of the sympow article.
    for degree, published in ((2, 39e6), (4, 14e9)):
        size = build_attention("sympow", 768, 12, degree=degree).state_size()
        assert size is not None
        assert 12 * 2 * size == pytest.approx(published, rel=0.03)
        assert size == 12 * symmetric_dim(64, degree) * 65 + 1  # and the rotation


def test_softmax_has_no_state_of_fixed_size() -> None:
    assert build_attention("softmax", WIDTH, HEADS).state_size() is None


def test_flops_grow_with_context_for_softmax_alone() -> None:
    sizes = {kind: [build_attention(kind, 64, 1).flops_per_token(T) for T in (2**15, 2**16)]
             for kind in ("softmax", "sympow")}  # fmt: skip
    assert sizes["softmax"][1] > 1.9 * sizes["softmax"][0]
    assert sizes["sympow"][1] < 1.01 * sizes["sympow"][0]


def test_gates_and_rates_are_not_rounded_by_autocast() -> None:
    attention = build_attention("conformal_sympow", WIDTH, HEADS)
    x = torch.randn(1, 30, WIDTH)
    wanted = attention.gate(x), attention.rate(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(attention.gate(x), wanted[0])
        assert torch.equal(attention.rate(x), wanted[1])


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("sympow", {"degree": 3}, "degree: found 3"),
        ("sympow", {"degree": 0}, "degree: found 0"),
        ("sympow", {"longest_document": 1}, "longest_document: found 1"),
        ("softmax", {"rotary_base": 0.5}, "rotary_base: found 0.5"),
        ("softmx", {}, "wanted one of"),
    ],
)
def test_bad_options_are_named(kind: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_attention(kind, WIDTH, HEADS, **options)


def test_width_must_divide_into_heads() -> None:
    with pytest.raises(ValueError, match="num_heads: found 3"):
        build_attention("sympow", 16, 3)
