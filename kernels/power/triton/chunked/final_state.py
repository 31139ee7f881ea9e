"""The final state alone, forward and backward."""

from __future__ import annotations

import torch
from torch import Tensor

from longhaul.kernels.common.triton.chunking import sum_gates
from longhaul.kernels.common.triton.launch import with_dense_rows
from longhaul.kernels.power.call import PowerCall, Saved, SavedState, StateGrads
from longhaul.kernels.power.state import PowerState
from longhaul.kernels.power.triton.chunked.backward import chunked_backward
from longhaul.kernels.power.triton.chunked.forward import chunks_of, states_before_chunks
from longhaul.kernels.power.triton.features import tiles_of


def final_state(
    call: PowerCall,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None,
    kv: Tensor | None,
    norm: Tensor | None,
    cu_seqlens: Tensor | None,
) -> PowerState:
    """The state after the last token of every sequence."""
    k, v = with_dense_rows(k), with_dense_rows(v)
    kv, norm = (None if x is None else x.contiguous() for x in (kv, norm))
    chunks = chunks_of(call, k, cu_seqlens)
    tiles = tiles_of(k.shape[3], call.degree, k.device, k.dtype)
    gates = None if log_g is None else sum_gates(log_g, chunks)
    S, (G, V) = chunks.sequences.shape[0], v.shape[2:]
    final = PowerState(
        k.new_empty(S, G, tiles.P, V, dtype=torch.float32),
        k.new_empty(S, G, tiles.P, dtype=torch.float32),
    )
    states_before_chunks(
        call, k, v, gates, chunks, tiles, (kv, norm), (final.kv, final.norm), has_norm=True
    )
    return final


def final_state_backward(
    call: PowerCall,
    saved: SavedState,
    dkv: Tensor | None,
    dnorm: Tensor | None,
) -> StateGrads:
    """Gradients of k, v, log_g and the initial state.

    The kernel for dk and dv also computes attention inside chunks, so this runs the backward of the
    whole op on queries and outputs of zero.
    """
    k, v = saved.k, saved.v
    whole = Saved(
        q=torch.zeros_like(k),
        k=k,
        v=v,
        log_g=saved.log_g,
        kv=saved.kv,
        norm=saved.norm,
        cu_seqlens=saved.cu_seqlens,
        out=torch.zeros_like(v),
        final_kv=saved.final_kv,
        final_norm=saved.final_norm,
        inverse=None,
        is_live=None,
    )
    has_state, has_gates = saved.kv is not None, saved.log_g is not None
    needs = (False, True, True, has_gates, has_state, has_state)
    _, dk, dv, *rest = chunked_backward(call, whole, None, dkv, dnorm, needs)
    assert dk is not None
    assert dv is not None
    return dk, dv, rest[0], rest[1], rest[2]
