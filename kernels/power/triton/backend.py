"""The passes of the Triton backend, and the calls that it does not support."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from longhaul.kernels.power.call import (
    Forward,
    Grads,
    PowerCall,
    Saved,
    SavedState,
    StateGrads,
)
from longhaul.kernels.power.state import PowerState
from longhaul.kernels.power.triton.attention.backward import attention_backward
from longhaul.kernels.power.triton.attention.forward import attention_forward
from longhaul.kernels.power.triton.chunked.backward import chunked_backward
from longhaul.kernels.power.triton.chunked.final_state import final_state, final_state_backward
from longhaul.kernels.power.triton.chunked.forward import chunked_forward
from longhaul.kernels.power.triton.step import take_step

__all__ = ["backward", "forward", "state_backward", "state_forward", "step", "why_not"]

_WIDEST = 256
# The largest key width, by degree, whose states fit a program's registers and shared memory.
_WIDEST_STATE = {1: 256, 2: 128, 4: 32}


def why_not(call: PowerCall, K: int, V: int, has_state: bool) -> str | None:
    """Why the kernels do not support a call; None if they do."""
    if max(K, V) > _WIDEST:
        return f"its kernels take K and V up to {_WIDEST}, found {K} and {V}"
    needs_state = has_state or call.output_final_state or call.form == "chunked"
    if needs_state and call.degree not in _WIDEST_STATE:
        return f"its kernels keep states of degree 1, 2 and 4, found {call.degree}"
    if needs_state and _WIDEST_STATE[call.degree] < K:
        widest = _WIDEST_STATE[call.degree]
        return f"its kernels keep states of degree {call.degree} up to K = {widest}, found {K}"
    return None


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Make `device` current, as Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _is_plain_attention(call: PowerCall, kv: Tensor | None) -> bool:
    return call.form == "attention" and kv is None and not call.output_final_state


def forward(
    call: PowerCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None,
    kv: Tensor | None,
    norm: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Forward:
    """Output, final state and denominators: call.py says what each is."""
    with _on(q.device):
        if _is_plain_attention(call, kv):
            out, inverse, is_live = attention_forward(call, q, k, v, log_g, cu_seqlens)
            return Forward(out, None, None, inverse, is_live)
        # With an initial or a final state, the attention form is the chunked form with one chunk.
        return chunked_forward(call, q, k, v, log_g, kv, norm, cu_seqlens)


def backward(
    call: PowerCall,
    saved: Saved,
    dout: Tensor | None,
    dkv: Tensor | None,
    dnorm: Tensor | None,
    needs: tuple[bool, ...],
) -> Grads:
    """Gradients of q, k, v, log_g, kv and norm; None where not needed."""
    with _on(saved.q.device):
        if not _is_plain_attention(call, saved.kv):
            return chunked_backward(call, saved, dout, dkv, dnorm, needs)
        if dout is None:
            return (None,) * 6
        return (*attention_backward(call, saved, dout, needs), None, None)


def state_forward(
    call: PowerCall,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None,
    kv: Tensor | None,
    norm: Tensor | None,
    cu_seqlens: Tensor | None,
) -> PowerState:
    """The final state alone."""
    with _on(k.device):
        return final_state(call, k, v, log_g, kv, norm, cu_seqlens)


def state_backward(
    call: PowerCall, saved: SavedState, dkv: Tensor | None, dnorm: Tensor | None
) -> StateGrads:
    """Gradients of k, v, log_g, kv and norm."""
    with _on(saved.k.device):
        return final_state_backward(call, saved, dkv, dnorm)


def step(
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
    """One token, q (B, 1, H, K), and the state after it, which is `state` itself if in place."""
    with _on(q.device):
        return take_step(
            state, q, k, v, log_g,
            degree=degree, scale=scale, normalize=normalize, inplace=inplace,
        )  # fmt: skip
