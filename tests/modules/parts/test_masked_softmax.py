"""Softmax attention with a bias, or within documents, against the formula over pairs of tokens."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, is_tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from longhaul.modules.attention.parts import document_softmax, masked_softmax
from longhaul.modules.attention.parts.gates import alibi_slopes

CPU = torch.device("cpu")
T = 40
DOCUMENTS = [[1, 3, 4, 32], [40], [17, 23]]


def ages(rows: list[list[int]]) -> Tensor:
    return torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in rows])


def explicit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor | None,
    age: Tensor | None,
    *,
    decay: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    k, v = (one.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for one in (k, v))
    distance = torch.arange(k.shape[2])[-q.shape[2] :, None] - torch.arange(k.shape[2])
    hidden = (distance < 0)[None] if age is None else (distance < 0) | (distance > age[..., None])
    logits = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    if window is not None:
        hidden = hidden | (distance >= window)
    if slopes is not None:
        logits = logits - slopes[:, None, None] * distance
    if decay is not None:
        logits = logits + decay[:, :, -q.shape[2] :, None] - decay[:, :, None]
    return logits.masked_fill(hidden[:, None], -torch.inf).softmax(-1) @ v


CASES = pytest.mark.parametrize(
    "case",
    [(heads, True, queries, None) for heads in (2, 3) for queries in (T, 5, 1)]
    + [(2, has_bias, queries, DOCUMENTS) for has_bias in (False, True) for queries in (T, 5)],
)


def inputs(
    heads: int, has_bias: bool, queries: int, documents: list[list[int]] | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """The queries, and where their documents begin, are those of the last tokens."""
    q, k, v = torch.randn(3, 3, heads, T, 8, dtype=torch.float64).unbind(0)
    slopes = alibi_slopes(heads, CPU) if has_bias else None
    age = None if documents is None else ages(documents)[:, T - queries :]
    return q[:, :, T - queries :], k, v, slopes, age


def check_formula(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, age: Tensor | None
) -> None:
    """Compare output and gradients with the formula's."""
    inputs = [one.requires_grad_() for one in (q, k, v)]
    found = masked_softmax.masked_softmax(*inputs, slopes, age)
    wanted = explicit(*inputs, slopes, age)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-13)
    probe = torch.randn_like(found)
    gradients = (torch.autograd.grad(y, inputs, probe) for y in (found, wanted))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@CASES
@pytest.mark.parametrize("at_once", [7, 1024])
def test_blocks_of_queries_compute_the_formula_and_its_gradients(
    monkeypatch: pytest.MonkeyPatch, at_once: int, case: Any
) -> None:
    for module in (masked_softmax, document_softmax):
        monkeypatch.setattr(module, "QUERIES_AT_ONCE", at_once)
    q, k, v, *rest = inputs(*case)
    check_formula(q, k, v, *rest)


@pytest.mark.parametrize("tokens_first", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("short", [1, 64], ids=["one by one", "copied"])
def test_documents_of_one_length_may_lie_anywhere(
    monkeypatch: pytest.MonkeyPatch, short: int, has_bias: bool, tokens_first: bool
) -> None:
    monkeypatch.setattr(document_softmax, "SHORT", short)
    monkeypatch.setattr(document_softmax, "QUERIES_AT_ONCE", 7)
    q, k, v, *rest = inputs(2, has_bias, T, [[3, 4, 3, 5, 3, 9, 13], [40], [3, 3, 9, 9, 3, 13]])
    if tokens_first:  # as layers have them
        q, k, v = (one.transpose(1, 2).contiguous().transpose(1, 2) for one in (q, k, v))
    check_formula(q, k, v, *rest)


LIMITS = pytest.mark.parametrize(
    "limits",
    [
        {"window": 9},
        {"window": 1, "scale": 0.3},
        {"softcap": 1.5},
        {"window": 17, "softcap": 2.0, "scale": 0.2},
        {"decay": True},
        {"decay": True, "window": 9, "softcap": 2.0},
    ],
)
ROWS = pytest.mark.parametrize(
    ("queries", "documents"), [(T, None), (5, None), (1, None), (T, DOCUMENTS), (5, DOCUMENTS)]
)


def grouped(queries: int, documents: list[list[int]] | None) -> tuple[Any, ...]:
    """Four query heads for two key heads, and values that are narrower than keys."""
    q, k, v, *rest = inputs(4, False, queries, documents)
    return q, k[:, :2], v[:, :2, :, :6], *rest


def with_decay(limits: dict[str, Any]) -> dict[str, Any]:
    """The limits with running sums of log gates where they ask for some."""
    if "decay" not in limits:
        return limits
    return limits | {"decay": -torch.rand(3, 4, T, dtype=torch.float64).cumsum(-1)}


@LIMITS
@ROWS
@pytest.mark.parametrize("at_once", [7, 1024])
def test_windows_and_caps_compute_the_formula_and_its_gradients(
    monkeypatch: pytest.MonkeyPatch,
    queries: int,
    documents: list[list[int]] | None,
    limits: dict[str, Any],
    at_once: int,
) -> None:
    monkeypatch.setattr(masked_softmax, "QUERIES_AT_ONCE", at_once)
    q, k, v, *rest = grouped(queries, documents)
    limits = with_decay(limits)
    leaves = [one.requires_grad_() for one in (q, k, v, limits.get("decay")) if is_tensor(one)]
    found = masked_softmax.masked_softmax(q, k, v, *rest, **limits)
    wanted = explicit(q, k, v, *rest, **limits)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-13)
    probe = torch.randn_like(found)
    gradients = (torch.autograd.grad(y, leaves, probe) for y in (found, wanted))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("queries", "documents", "limits"),
    [
        (5, None, {"window": 9}),
        (T, DOCUMENTS, {"window": 9}),
        (1, None, {"window": 1, "scale": 0.3}),
        (T, None, {"softcap": 1.5}),
        (T, DOCUMENTS, {"window": 17, "softcap": 2.0, "scale": 0.2}),
    ],
)
@torch.no_grad()
def test_flex_attention_computes_windows_and_caps(
    queries: int, documents: list[list[int]] | None, limits: dict[str, Any]
) -> None:
    arguments, limits = grouped(queries, documents), with_decay(limits)
    found = masked_softmax._mix_flex(*arguments, **limits)
    torch.testing.assert_close(found, explicit(*arguments, **limits), rtol=0, atol=1e-12)


@CASES
@torch.no_grad()
def test_flex_attention_computes_the_formula(case: Any) -> None:
    arguments = inputs(*case)
    torch.testing.assert_close(
        masked_softmax._mix_flex(*arguments), explicit(*arguments), rtol=0, atol=1e-12
    )


def test_keys_outside_all_windows_cost_nothing() -> None:
    q, k, v = torch.randn(3, 1, 1, 4096, 8).unbind(0)
    counted = []
    for window in (64, 128):
        with FlopCounterMode(display=False) as counter:
            masked_softmax.masked_softmax(q, k, v, None, None, window=window, softcap=9.0)
        counted.append(counter.get_total_flops())
    assert counted[1] < 4 * 4096 * 8 * (128 + 128)


def assert_same_blocks(found: BlockMask, wanted: BlockMask) -> None:
    assert (found.seq_lengths, found.BLOCK_SIZE) == (wanted.seq_lengths, wanted.BLOCK_SIZE)
    for part in ("kv", "full_kv", "q", "full_q"):
        counts = [getattr(one, f"{part}_num_blocks") for one in (found, wanted)]
        assert torch.equal(*counts)
        lists = [getattr(one, f"{part}_indices") for one in (found, wanted)]
        for at in torch.cartesian_prod(*(torch.arange(n) for n in counts[0].shape)).tolist():
            count = counts[0][tuple(at)]
            assert torch.equal(*(one[tuple(at)][:count] for one in lists))


@pytest.mark.parametrize(("queries", "keys"), [(256, 256), (300, 300), (100, 500), (1, 257)])
def test_the_blocks_of_a_causal_mask_are_those_that_torch_finds(queries: int, keys: int) -> None:
    wanted = create_block_mask(
        lambda b, h, t, i: t + (keys - queries) >= i, None, None, queries, keys, device=CPU
    )
    assert_same_blocks(masked_softmax._causal(queries, keys, CPU), wanted)


@pytest.mark.parametrize("queries", [500, 130])
def test_the_blocks_of_documents_are_those_that_torch_finds(queries: int) -> None:
    past = 500 - queries
    age = ages([[1, 127, 128, 244], [500], [129, 300, 1, 70], [5] * 100])[:, past:]
    found = masked_softmax._within_documents(queries, 500, age)
    wanted = create_block_mask(
        lambda b, h, t, i: (t + past >= i) & (t + past - i <= age[b, t]),
        len(age), None, queries, 500, device=CPU,
    )  # fmt: skip
    assert_same_blocks(found, wanted)


@pytest.mark.parametrize(("queries", "keys"), [(256, 256), (300, 300), (100, 500), (1, 257)])
@pytest.mark.parametrize("window", [1, 128, 130, 400])
def test_the_blocks_of_a_window_are_those_that_torch_finds(
    queries: int, keys: int, window: int
) -> None:
    past = keys - queries
    wanted = create_block_mask(
        lambda b, h, t, i: (t + past >= i) & (t + past - i < window),
        None, None, queries, keys, device=CPU,
    )  # fmt: skip
    assert_same_blocks(masked_softmax._within(queries, keys, window, CPU), wanted)


@pytest.mark.parametrize(
    "mask",
    [
        lambda: masked_softmax._causal(4096, 4096, CPU),
        lambda: masked_softmax._within(4096, 4096, 300, CPU),
        lambda: masked_softmax._within_documents(4096, 4096, torch.arange(4096)[None]),
    ],
)
def test_a_mask_is_not_written_out(mask: Callable[[], BlockMask]) -> None:
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            largest = max([largest, *(x.numel() for x in tree_leaves(result) if is_tensor(x))])
            return result

    with Watch():
        mask()
    assert largest <= max((4096 // 128 + 1) ** 2, 4096)
