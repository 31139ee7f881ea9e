"""Splits, packing, causality, steps and memory of the delta rule."""

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from longhaul.kernels import delta_rule, delta_rule_step
from longhaul.kernels.testing import assert_close

CHUNK = 16
FORMS: dict[str, dict[str, Any]] = {
    "chunked": {"chunk_size": CHUNK},
    "recurrent": {"form": "recurrent"},
    "reference": {"backend": "reference"},
}
per_form = pytest.mark.parametrize("how", FORMS.values(), ids=FORMS.keys())
per_gate = pytest.mark.parametrize("gates", ["none", "scalar", "channel"])
per_dtype = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])


def inputs(
    T: int, *, B: int = 1, gates: str = "scalar", dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """q, k, v, beta and log_g, always with gates: those of "none" are 1."""
    H, G, K, V = 4, 2, 6, 5
    q, k = torch.randn(B, T, G, K), F.normalize(torch.randn(B, T, G, K), dim=-1)
    log_g = -torch.rand(B, T, H, K) * (gates != "none")
    wide = dtype if dtype == torch.float64 else torch.float32
    return [
        *(x.to(dtype) for x in (q, k, torch.randn(B, T, H, V))),
        (2 * torch.rand(B, T, H)).to(wide),
        (log_g if gates == "channel" else log_g[..., 0]).to(wide).contiguous(),
    ]


def run(x: list[Tensor], *, state_counts: bool = True, **how: Any) -> tuple[Tensor, ...]:
    """Output, final state, and the gradients of the sum of sines of the output (and the state)."""
    leaves = [one.detach().clone().requires_grad_() for one in x]
    out, state = delta_rule(*leaves, output_final_state=True, **how)
    assert state is not None
    loss = out.double().sin().sum() + state_counts * state.double().sin().sum()
    return out.detach(), state.detach(), *torch.autograd.grad(loss, leaves)


def close(found: Tensor, wanted: Tensor) -> bool:
    return torch.allclose(found, wanted, rtol=0, atol=1e-12 * (1 + wanted.abs().max().item()))


@per_form
@per_gate
def test_a_split_changes_nothing(gates: str, how: dict[str, Any]) -> None:
    x = inputs(40, B=2, gates=gates)
    wanted = delta_rule(*x, output_final_state=True, backend="reference")
    for split in (1, 15, 16, 17, 37):
        head, state = delta_rule(*(one[:, :split] for one in x), output_final_state=True, **how)
        tail, after = delta_rule(
            *(one[:, split:] for one in x), initial_state=state, output_final_state=True, **how
        )
        assert after is not None
        assert wanted[1] is not None
        assert close(torch.cat([head, tail], dim=1), wanted[0])
        assert close(after, wanted[1])


@per_gate
@pytest.mark.parametrize("erases", [False, True])
def test_gradients_of_the_state_alone(gates: str, erases: bool) -> None:
    """As where the last tokens of a document have no loss: no gradient of the output comes back."""
    x = inputs(40, gates=gates)

    def gradients(**how: Any) -> tuple[Tensor, ...]:
        leaves = [one.detach().requires_grad_() for one in x]
        q, k, v, beta, log_g = leaves
        beta_or_none = beta if erases else None
        _, state = delta_rule(q, k, v, beta_or_none, log_g, output_final_state=True, **how)
        assert state is not None
        used = [k, v, log_g, *([beta] if erases else [])]
        return torch.autograd.grad(state.sin().sum(), used)

    wanted = gradients(backend="reference")
    assert all(close(*pair) for pair in zip(gradients(chunk_size=CHUNK), wanted, strict=True))


def lengths() -> list[int]:
    """Every length from 1 to a chunk and a token, in an order in which chunks hold several."""
    return [
        n for pair in zip(range(1, CHUNK + 2), range(CHUNK + 1, 0, -1), strict=True) for n in pair
    ]


@per_gate
@pytest.mark.parametrize("form", ["chunked", "recurrent"])
def test_packed_documents_are_separate_ones(gates: str, form: str) -> None:
    sizes = lengths()
    x = inputs(sum(sizes), gates=gates)
    states = torch.randn(len(sizes), 4, 6, 5, dtype=torch.float64)
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    found = run(x, cu_seqlens=offsets, initial_state=states, **FORMS[form])
    separate = [
        run([one[:, start:end] for one in x], initial_state=states[n : n + 1], backend="reference")
        for n, (start, end) in enumerate(pairwise(offsets))
    ]
    for name, one, *parts in zip("oSqkvbg", found, *separate, strict=True):
        assert close(one, torch.cat(parts, dim=0 if name == "S" else 1)), name


@per_gate
def test_gates_of_zero_separate_documents(gates: str) -> None:
    sizes = lengths()
    x = inputs(sum(sizes), gates=gates)
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    separate = [
        run([one[:, start:end] for one in x], state_counts=False, backend="reference")
        for start, end in pairwise(offsets)
    ]
    x[4][:, offsets[:-1]] = -torch.inf
    found = run(x, state_counts=False, chunk_size=CHUNK)
    assert close(found[1], separate[-1][1])
    for n, name in enumerate("oSqkvbg"):
        if name != "S":
            wanted = torch.cat([one[n] for one in separate], dim=1)
            if name == "g":
                wanted[:, offsets[:-1]] = 0
            assert close(found[n], wanted), name


@per_gate
@per_dtype
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_neighbour_leaves_not_one_bit(gates: str, dtype: torch.dtype, is_packed: bool) -> None:
    """Other documents of the row change: outputs and gradients of this one do not."""
    offsets = torch.tensor([0, 5, 22, 29, 50])
    start, end = 22, 29
    x = inputs(50, gates=gates, dtype=dtype)
    how: dict[str, Any] = {"chunk_size": CHUNK}
    if is_packed:
        how["cu_seqlens"] = offsets
    else:
        x[4][:, offsets[:-1]] = -torch.inf
    other = [one.clone() for one in x]
    inside = torch.zeros(50, dtype=torch.bool)
    inside[start:end] = True
    for one, new in zip(other, inputs(50, gates=gates, dtype=dtype), strict=True):
        one[:, ~inside] = new[:, ~inside]
    if not is_packed:
        other[4][:, offsets[:-1]] = -torch.inf
    for n, (one, two) in enumerate(zip(run(x, **how), run(other, **how), strict=True)):
        if n != 1:
            assert torch.equal(one[:, inside], two[:, inside]), n


@per_gate
@per_dtype
def test_the_future_changes_not_one_bit(gates: str, dtype: torch.dtype) -> None:
    x, other = (inputs(75, gates=gates, dtype=dtype) for _ in range(2))
    wanted, _ = delta_rule(*x, chunk_size=CHUNK)
    for t in (1, 7, 8, 15, 16, 17, 40, 74):
        changed = [torch.cat([a[:, :t], b[:, t:]], dim=1) for a, b in zip(x, other, strict=True)]
        found, _ = delta_rule(*changed, chunk_size=CHUNK)
        assert torch.equal(found[:, :t], wanted[:, :t])
        assert not torch.equal(found[:, t], wanted[:, t])


@per_gate
def test_other_rows_change_not_one_bit(gates: str) -> None:
    x, other = (inputs(40, B=3, gates=gates, dtype=torch.float32) for _ in range(2))
    for a, b in zip(x, other, strict=True):
        b[1] = a[1]
    for one, two in zip(run(x), run(other), strict=True):
        assert torch.equal(one[1], two[1])


@per_gate
@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("inplace", [False, True])
def test_steps_are_the_chunked_form(gates: str, inplace: bool, backend: Any) -> None:
    x = inputs(20, B=2, gates=gates)
    state = torch.randn(2, 4, 6, 5, dtype=torch.float64)
    wanted, after = delta_rule(*x, initial_state=state, output_final_state=True, chunk_size=8)
    now, before = state.clone(), state.clone()
    outputs = []
    for t in range(20):
        given = now
        out, now = delta_rule_step(
            now, *(one[:, t : t + 1] for one in x), inplace=inplace, backend=backend
        )
        assert (now is given) == inplace
        outputs.append(out)
    assert after is not None
    assert close(torch.cat(outputs, dim=1), wanted)
    assert close(now, after)
    assert torch.equal(state, before)


def test_a_step_in_place_keeps_the_dtype_of_the_state() -> None:
    x = inputs(1, dtype=torch.bfloat16)
    state = torch.zeros(1, 4, 6, 5)
    out, after = delta_rule_step(state, *x, inplace=True)
    assert out.dtype == torch.bfloat16
    assert after is state
    assert close(state.double(), delta_rule(*x, output_final_state=True)[1].double())  # type: ignore[union-attr]


def test_no_input_is_written_to() -> None:
    for gates in ("none", "scalar", "channel"):
        for T, H in ((16, 1), (40, 4)):
            x = [one[:, :, :H].contiguous() for one in inputs(T, gates=gates)]
            x[0], x[1] = (one[:, :, :1].contiguous() for one in x[:2])
            state = torch.randn(1, H, 6, 5, dtype=torch.float64)
            before = [one.clone() for one in (*x, state)]
            run(x, initial_state=state, chunk_size=CHUNK)
            assert all(torch.equal(a, b) for a, b in zip((*x, state), before, strict=True))


def test_states_are_kept_for_chunks_and_nothing_for_tokens() -> None:
    """Beside its inputs the backward pass keeps at most a state for each chunk."""
    x = [one.requires_grad_() for one in inputs(4096, dtype=torch.float32)]
    saved: list[Tensor] = []

    def keep(one: Tensor) -> Tensor:
        saved.append(one)
        return one

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
        delta_rule(*x)
    own = {one.data_ptr() for one in x}
    kept = [one for one in saved if one.data_ptr() not in own]
    assert sum(one.numel() for one in kept) <= 4096 // 64 * 4 * 6 * 5


def test_reflections_keep_the_norm_of_a_state() -> None:
    """At beta = 2 without decay each token reflects the state along a key: errors do not fade."""
    T = 512
    k = F.normalize(torch.randn(1, T, 1, 8), dim=-1)
    v, beta = torch.zeros(1, T, 1, 4), torch.full((1, T, 1), 2.0)
    state = torch.randn(1, 1, 8, 4)
    _, after = delta_rule(k, k, v, beta, initial_state=state, output_final_state=True)
    assert after is not None
    assert abs(after.norm() / state.norm() - 1) < 1e-5


def test_nearly_parallel_keys_keep_their_digits() -> None:
    """Powers of the matrix of scores would be of 1e17 here, where its inverse is below 2."""
    T = 256
    k = F.normalize(torch.randn(1, 1, 1, 32) + 0.05 * torch.randn(1, T, 1, 32), dim=-1)
    x = [torch.randn(1, T, 1, 32), k, torch.randn(1, T, 1, 32), torch.full((1, T, 1), 2.0)]
    wanted, _ = delta_rule(*(one.double() for one in x), backend="reference")
    rounded, _ = delta_rule(*x, backend="reference")
    found, _ = delta_rule(*x)
    assert_close(found, wanted, rounded, multiple=40.0)
