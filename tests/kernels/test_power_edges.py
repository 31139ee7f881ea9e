"""What the op promises at its edges: splits, packing, causality, resets, small denominators."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from longhaul.kernels import PowerState, power_attention, power_attention_step, state_features
from longhaul.kernels.power.checks import check_offsets

FORMS: list[dict[str, Any]] = [
    {"form": "attention"},
    {"form": "chunked", "chunk_size": 16},
    {"form": "recurrent"},
    {"backend": "reference"},
]
IDS = ["attention", "chunked", "recurrent", "reference"]
per_form = pytest.mark.parametrize("how", FORMS, ids=IDS)


def inputs(T: int, K: int = 8, V: int = 4, H: int = 4, G: int = 2, B: int = 1) -> list[Tensor]:
    q, k = torch.randn(B, T, H, K).double(), torch.randn(B, T, G, K).double()
    v = torch.randn(B, T, G, V).double()
    return [q, k, v, logsigmoid(torch.randn(B, T, G).double() + 2)]


@pytest.mark.parametrize("second", FORMS, ids=IDS)
@pytest.mark.parametrize("first", FORMS, ids=IDS)
def test_a_split_changes_nothing(first: dict[str, Any], second: dict[str, Any]) -> None:
    """Across forms and backends, with a split inside a chunk, after it, and near the ends."""
    x = inputs(70, B=2)
    whole, final = power_attention(*x, output_final_state=True)
    assert final is not None
    for split in (1, 16, 37, 69):
        head, state = power_attention(*(y[:, :split] for y in x), output_final_state=True, **first)
        tail, after = power_attention(
            *(y[:, split:] for y in x), initial_state=state, output_final_state=True, **second
        )
        torch.testing.assert_close(torch.cat([head, tail], dim=1), whole, rtol=1e-9, atol=1e-9)
        assert after is not None
        torch.testing.assert_close(tuple(after), tuple(final), rtol=1e-9, atol=1e-9)


@per_form
def test_a_split_changes_no_gradient(how: dict[str, Any]) -> None:
    x = [y.requires_grad_() for y in inputs(50)]
    weights = torch.randn(1, 50, 4, 4).double()
    whole, _ = power_attention(*x)
    wanted = torch.autograd.grad((whole * weights).sum(), x)
    head, state = power_attention(*(y[:, :23] for y in x), output_final_state=True, **how)
    tail, _ = power_attention(*(y[:, 23:] for y in x), initial_state=state, **how)
    actual = torch.autograd.grad((torch.cat([head, tail], 1) * weights).sum(), x)
    torch.testing.assert_close(actual, wanted, rtol=1e-8, atol=1e-8)


@per_form
@pytest.mark.parametrize("has_state", [False, True])
def test_packed_documents_equal_separate_ones(how: dict[str, Any], has_state: bool) -> None:
    offsets = [0, 1, 17, 50, 83]
    x = [y.requires_grad_() for y in inputs(83)]
    N, P = len(offsets) - 1, state_features(8, 2)
    state = None
    if has_state:
        past = torch.randn(N, 5, 2, 8).double()
        _, state = power_attention(
            past, past, torch.randn(N, 5, 2, 4).double(), output_final_state=True
        )
        assert state is not None
        assert state.kv.shape == (N, 2, P, 4)
    packed, finals = power_attention(
        *x,
        cu_seqlens=torch.tensor(offsets),
        initial_state=state,
        output_final_state=has_state,
        **how,
    )
    weights = torch.randn(packed.shape).double()
    grads = torch.autograd.grad((packed * weights).sum(), x)
    for n, (start, end) in enumerate(pairwise(offsets)):
        document = [y.detach()[:, start:end].requires_grad_() for y in x]
        before = None if state is None else PowerState(*(part[n : n + 1] for part in state))
        out, after = power_attention(
            *document, initial_state=before, output_final_state=has_state, backend="reference"
        )
        torch.testing.assert_close(packed[:, start:end], out, rtol=1e-9, atol=1e-9)
        own = torch.autograd.grad((out * weights[:, start:end]).sum(), document)
        packed_grads = tuple(grad[:, start:end] for grad in grads)
        torch.testing.assert_close(packed_grads, own, rtol=1e-8, atol=1e-8)
        if after is not None:
            assert finals is not None
            torch.testing.assert_close(finals.kv[n], after.kv[0], rtol=1e-9, atol=1e-9)


@per_form
def test_outputs_ignore_the_future_to_the_bit(how: dict[str, Any]) -> None:
    x = [y.float() for y in inputs(300, K=16)]
    out, _ = power_attention(*x, **how)
    for t in (1, 100, 137, 299):
        changed = [y.clone() for y in x]
        for y in changed[:3]:
            y[:, t:] = 100 * torch.randn_like(y[:, t:])
        changed[3][:, t:] = -20 * torch.rand_like(changed[3][:, t:])
        other, _ = power_attention(*changed, **how)
        assert torch.equal(other[:, :t], out[:, :t])
        assert not torch.equal(other[:, t:], out[:, t:])


@per_form
def test_a_gate_of_zero_forgets_everything(how: dict[str, Any]) -> None:
    x = [y.float() for y in inputs(60)]
    x[3][:, 33] = -torch.inf
    out, _ = power_attention(*x, **how)
    other = [y.clone() for y in x]
    for y in other[:3]:
        y[:, :33] = 1e3 * torch.randn_like(y[:, :33])
    after, _ = power_attention(*other, **how)
    assert torch.equal(after[:, 33:], out[:, 33:])


@per_form
def test_gates_before_a_reset_feel_nothing_after_it(how: dict[str, Any]) -> None:
    """Not even the rounding errors of large gradients: the sums of eq. (15) stop at the reset."""
    q, k, v, log_g = inputs(60)
    log_g[:, 33] = -torch.inf
    v[:, 33:] *= 1e6
    log_g.requires_grad_()
    weights = torch.rand(1, 60, 4, 4)
    out, _ = power_attention(q, k, v, log_g, backend="reference", normalize=False)
    (wanted,) = torch.autograd.grad((out * weights).sum(), log_g)
    x = [y.detach().float() for y in (q, k, v, log_g)]
    x[3].requires_grad_()
    out, _ = power_attention(*x, normalize=False, **how)
    (actual,) = torch.autograd.grad((out * weights).sum(), x[3])
    size = wanted[:, :33].abs().max().item()
    assert (actual - wanted)[:, :33].abs().max() < 1e-5 * size


@per_form
@pytest.mark.parametrize("gate", [-torch.inf, -1e30, -100.0, 0.0])
def test_gates_of_any_size_give_finite_gradients(how: dict[str, Any], gate: float) -> None:
    x = [y.float() for y in inputs(40)]
    x[3][:, 5:20] = gate
    x[3][:, 0] = gate
    leaves = [y.requires_grad_() for y in x]
    out, state = power_attention(*leaves, output_final_state=True, **how)
    assert state is not None
    (out.sum() + state.kv.sum()).backward()
    for y in [out, *state, *(leaf.grad for leaf in leaves)]:
        assert y is not None
        assert y.isfinite().all()
    if gate == -torch.inf:
        assert leaves[3].grad is not None
        assert (leaves[3].grad[:, 5:20] == 0).all()


@per_form
@pytest.mark.parametrize("scale", [1.0, 1e-12])
def test_a_query_orthogonal_to_every_key_stays_small(how: dict[str, Any], scale: float) -> None:
    """The denominator is 0, and rounding alone decides what the state makes of it."""
    q, k, v, log_g = (y.float() for y in inputs(200, K=16))
    k[..., 8:] = 0
    q[:, 150:, :, :8] = 0
    # A rotation keeps them orthogonal, and every product of coordinates away from 0.
    rotation = torch.linalg.qr(torch.randn(16, 16))[0]
    leaves = [y.requires_grad_() for y in (q @ rotation * scale, k @ rotation, v, log_g)]
    out, _ = power_attention(*leaves, **how)
    out.sum().backward()
    assert out.abs().max() < 10 * v.abs().max()
    for leaf in leaves:
        assert leaf.grad is not None
        assert leaf.grad.isfinite().all()


@per_form
def test_no_key_met_reads_zero(how: dict[str, Any]) -> None:
    q, k, v, _ = (y.float().requires_grad_() for y in inputs(40))
    out, _ = power_attention(q * 0, k, v, **how)
    out.sum().backward()
    assert (out == 0).all()
    assert q.grad is not None
    assert q.grad.isfinite().all()


@per_form
def test_autocast_keeps_float32_inside(how: dict[str, Any]) -> None:
    x = [y.float() for y in inputs(60)]
    wanted, _ = power_attention(*x, **how)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = power_attention(*x, **how)
    torch.testing.assert_close(out, wanted, rtol=1e-6, atol=1e-6)


BAD: list[tuple[str, dict[str, Any]]] = [
    ("degree: found 3, wanted 1 or an even", {"degree": 3}),
    ("degree: found 0", {"degree": 0}),
    ("chunk_size: found 0", {"chunk_size": 0}),
    ("form: found 'fused'", {"form": "fused"}),
    ("backend: found 'cuda'", {"backend": "cuda"}),
    ("backend: 'triton' cannot run", {"backend": "triton"}),
    ("k: found 3 heads, wanted a divisor of the 4", {"k": torch.ones(1, 20, 3, 8)}),
    (r"k: found shape \(1, 20, 2, 7\)", {"k": torch.ones(1, 20, 2, 7)}),
    (r"v: found shape \(1, 19, 2, 4\)", {"v": torch.ones(1, 19, 2, 4)}),
    ("v: found torch.int64", {"v": torch.ones(1, 20, 2, 4, dtype=torch.int64)}),
    (r"log_g: found shape \(1, 20, 4\)", {"log_g": torch.zeros(1, 20, 4)}),
    ("log_g: found torch.bfloat16", {"log_g": torch.zeros(1, 20, 2).bfloat16()}),
    ("document 1 from 5 to 5, wanted at least one", {"cu_seqlens": torch.tensor([0, 5, 5, 20])}),
    ("wanted offsets from 0 to 20", {"cu_seqlens": torch.tensor([0, 5, 19])}),
    (
        r"state.kv: found shape \(1, 2, 3, 4\), wanted \(1, 2, 64, 4\)",
        {"initial_state": PowerState(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3))},
    ),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("message", "change"), BAD, ids=[message for message, _ in BAD])
def test_bad_input_is_named(message: str, change: dict[str, Any]) -> None:
    q, k, v, log_g = (y.float() for y in inputs(20))
    call = {"q": q, "k": k, "v": v, "log_g": log_g} | change
    if "v" in change and "int64" not in message:
        call["k"] = k
    if "k" in change and "3 heads" in message:
        call["v"] = torch.ones(1, 20, 3, 4)
    with pytest.raises(ValueError, match=message):
        power_attention(**call)


@pytest.mark.usefixtures("unchecked")
def test_packing_needs_a_batch_of_one() -> None:
    with pytest.raises(ValueError, match="cu_seqlens: found B = 2"):
        power_attention(*inputs(20, B=2), cu_seqlens=torch.tensor([0, 20]))


@pytest.mark.usefixtures("unchecked")
def test_a_step_takes_one_token() -> None:
    state = PowerState(torch.zeros(1, 2, 64, 4), torch.zeros(1, 2, 64))
    with pytest.raises(ValueError, match="q: found 2 tokens, wanted 1"):
        power_attention_step(state, *inputs(2))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", ["kv", "norm", "q", "log_g"])
def test_a_step_in_place_refuses_what_needs_a_gradient(name: str) -> None:
    token = dict(zip(("q", "k", "v", "log_g"), inputs(1), strict=True))
    state = {"kv": torch.zeros(1, 2, 64, 4).double(), "norm": torch.zeros(1, 2, 64).double()}
    (state | token)[name].requires_grad_()
    with pytest.raises(ValueError, match="inplace: found tensors that need a gradient"):
        power_attention_step(PowerState(**state), **token, inplace=True)


def test_offsets_are_read_once_until_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = 0
    tolist = Tensor.tolist

    def counted(x: Tensor) -> Any:
        nonlocal reads
        reads += 1
        return tolist(x)

    monkeypatch.setattr(Tensor, "tolist", counted)
    offsets = torch.tensor([0, 5, 20])
    for _ in range(3):
        assert check_offsets(offsets, 1, 20) == (0, 5, 20)
    assert reads == 1
    offsets[1] = 7
    assert check_offsets(offsets, 1, 20) == (0, 7, 20)
    with pytest.raises(ValueError, match="wanted offsets from 0 to 21"):
        check_offsets(offsets, 1, 21)
    with torch.inference_mode():
        unversioned = torch.tensor([0, 5, 20])
        assert check_offsets(unversioned, 1, 20) == (0, 5, 20)
        unversioned[1] = 7
        assert check_offsets(unversioned, 1, 20) == (0, 7, 20)


def test_memory_stays_linear() -> None:
    """No tensor of the size of T × P or T × T is ever made, forward or backward."""
    T = 2048
    x = [y.float().requires_grad_() for y in inputs(T, K=16, V=16, H=1, G=1)]
    largest = 0

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor):
                largest = max(largest, result.numel())
            return result

    with Watch():
        out, _ = power_attention(*x, form="chunked", chunk_size=64)
        out.sum().backward()
    assert largest < T * state_features(16, 2) / 4
