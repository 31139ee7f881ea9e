"""Calls outside the custom ops: one token, the recurrent form of each backend, the reference."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from longhaul.kernels.power.reference import power_attention_reference
from longhaul.kernels.power.state import PowerState, round_kv
from longhaul.kernels.power.torch import backend as torch_backend
from longhaul.kernels.power.torch.step import power_attention_recurrent
from longhaul.kernels.shapes import state_features

# Maps (q, k, v, log_g, state) of unpacked sequences to the output and the final state.
Form = Callable[
    [Tensor, Tensor, Tensor, Tensor | None, PowerState | None], tuple[Tensor, PowerState]
]


def step(
    backend: str,
    state: PowerState,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None,
    *,
    degree: int,
    scale: float,
    normalize: bool,
    inplace: bool,
) -> tuple[Tensor, PowerState]:
    """One token, T = 1. In place, `state` is overwritten and returned, whatever its dtype."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    is_rounded = state.kv.dtype == torch.bfloat16
    # Triton's kernel reads and writes bfloat16 itself.
    kv = state.kv if is_rounded and backend == "triton" else state.kv.to(dtype)
    work = PowerState(kv, state.norm.to(dtype))
    if backend == "reference":
        out, after = _reference(
            q, k, v, log_g, work, degree=degree, scale=scale, normalize=normalize
        )
    elif backend == "triton":
        # Triton takes long to import, and may not be installed.
        from longhaul.kernels.power import triton

        out, after = triton.step(
            work, q, k, v, log_g,
            degree=degree, scale=scale, normalize=normalize, inplace=inplace,
        )  # fmt: skip
        if inplace:
            # Autograd cannot see that a kernel wrote to these tensors.
            torch.autograd.graph.increment_version(tuple(work))
    else:
        out, after = torch_backend.step(
            work, q, k, v, log_g,
            degree=degree, scale=scale, normalize=normalize, inplace=inplace,
        )  # fmt: skip
    if is_rounded and after.kv.dtype != torch.bfloat16:
        after = PowerState(round_kv(after.kv.float(), after.norm), after.norm)
    if not inplace:
        return out, after
    for old, new in zip(state, after, strict=True):
        if old is not new:
            old.copy_(new)
    return out, state


def per_document(
    form: Form,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None,
    state: PowerState | None,
    offsets: tuple[int, ...] | None,
) -> tuple[Tensor, PowerState]:
    """Run packed documents one by one, each with its own state, so that nothing leaks."""
    if offsets is None:
        return form(q, k, v, log_g, state)
    lengths = [end - start for start, end in pairwise(offsets)]
    # A split has one backward for all parts; N slices would each allocate a gradient of full size.
    q_parts, k_parts, v_parts = (torch.split(x, lengths, dim=1) for x in (q, k, v))
    gates = None if log_g is None else torch.split(log_g, lengths, dim=1)
    states = None if state is None else (torch.split(state.kv, 1), torch.split(state.norm, 1))
    results = [
        form(
            q_parts[n],
            k_parts[n],
            v_parts[n],
            None if gates is None else gates[n],
            None if states is None else PowerState(states[0][n], states[1][n]),
        )
        for n in range(len(lengths))
    ]
    kv, norm = (torch.cat(part) for part in zip(*(after for _, after in results), strict=True))
    return torch.cat([out for out, _ in results], dim=1), PowerState(kv, norm)


def _reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None,
    state: PowerState | None,
    *,
    degree: int,
    scale: float,
    normalize: bool,
) -> tuple[Tensor, PowerState]:
    kv, norm = (None, None) if state is None else state
    out, *after = power_attention_reference(
        q, k, v, log_g, kv, norm, degree=degree, scale=scale, normalize=normalize
    )
    return out, PowerState(*after)


def _recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None,
    state: PowerState | None,
    *,
    degree: int,
    scale: float,
    normalize: bool,
) -> tuple[Tensor, PowerState]:
    """The recurrent form in torch, differentiable."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    out, after = power_attention_recurrent(
        q.to(dtype),
        k.to(dtype),
        v.to(dtype),
        None if log_g is None else log_g.to(dtype),
        _initial_state(q, v, state, degree),
        degree=degree,
        scale=scale,
        normalize=normalize,
    )
    return out.to(q.dtype), after


def _recurrent_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None,
    state: PowerState | None,
    *,
    degree: int,
    scale: float,
    normalize: bool,
) -> tuple[Tensor, PowerState]:
    """Triton's kernel for each token, without gradients, on a copy of the state."""
    after = PowerState(*(x.clone() for x in _initial_state(q, v, state, degree)))
    outputs = []
    for t in range(q.shape[1]):
        at = (slice(None), slice(t, t + 1))
        out, after = step(
            "triton", after, q[at], k[at], v[at], None if log_g is None else log_g[at],
            degree=degree, scale=scale, normalize=normalize, inplace=True,
        )  # fmt: skip
        outputs.append(out)
    return torch.cat(outputs, dim=1), after


def _initial_state(q: Tensor, v: Tensor, state: PowerState | None, degree: int) -> PowerState:
    """The initial state in the dtype of accumulation, zeros if there is none."""
    B, _, _, K = q.shape
    G, V = v.shape[2:]
    like = q.new_empty(0, dtype=torch.promote_types(q.dtype, torch.float32))
    if state is None:
        P = state_features(K, degree)
        return PowerState(like.new_zeros(B, G, P, V), like.new_zeros(B, G, P))
    return PowerState(state.kv.to(like.dtype), state.norm.to(like.dtype))


FORMS = {"reference": _reference, "torch": _recurrent, "triton": _recurrent_triton}
