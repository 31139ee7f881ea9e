"""Forward of the chunked form: the states before chunks, then what queries read."""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor

from longhaul.kernels.common.triton.chunking import Chunks, Gates, cut, sum_gates
from longhaul.kernels.common.triton.launch import operands_of, with_dense_rows
from longhaul.kernels.power.call import Forward, PowerCall
from longhaul.kernels.power.triton.chunked.read import read_out
from longhaul.kernels.power.triton.chunked.state import States, accumulate, read_dtype
from longhaul.kernels.power.triton.chunked.sums import Sums, Tokens
from longhaul.kernels.power.triton.features import Tiles, tiles_of


def chunks_of(call: PowerCall, q: Tensor, cu_seqlens: Tensor | None) -> Chunks:
    """The chunks of a call. In the attention form each sequence is one chunk."""
    B, T = q.shape[:2]
    return cut(B, T, min(call.chunk_size, T), cu_seqlens, q.device)


def has_later_chunks(call: PowerCall, chunks: Chunks, T: int) -> bool:
    """Whether a chunk may follow another in its sequence, whose state it then reads."""
    return call.form == "chunked" and chunks.size < T


def _rounding(q: Tensor, tiles: Tiles) -> float:
    """4 ε of eq. (16), for float32 or for narrower operands, whose errors average out over P."""
    if q.dtype == torch.float32:
        return 4 * torch.finfo(torch.float32).eps
    bits = 8 if q.dtype == torch.bfloat16 else 10
    return 4 * 2.0**-bits / sqrt(tiles.P)


def states_before_chunks(
    call: PowerCall,
    k: Tensor,
    v: Tensor,
    gates: Gates | None,
    chunks: Chunks,
    tiles: Tiles,
    initial: tuple[Tensor | None, Tensor | None],
    final: tuple[Tensor | None, Tensor | None],
    *,
    has_norm: bool,
) -> States:
    """The state before every chunk, eq. (9); fills the final states."""
    sums = Sums(
        Tokens(k, v, None, None), gates, chunks, tiles, operands_of(k), k.shape[2], call.degree,
        factor=1.0, is_reverse=False,
    )  # fmt: skip
    states, _ = accumulate(sums, initial, final, None, has_norm=has_norm)
    return states


def no_states(q: Tensor) -> States:
    """Empty states, for a single chunk without an initial state."""
    return States(q.new_empty(0, dtype=read_dtype(q)), q.new_empty(0, dtype=torch.float32))


def chunked_forward(
    call: PowerCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None,
    kv: Tensor | None,
    norm: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Forward:
    """Output, final state and denominators."""
    q, k, v = with_dense_rows(q), with_dense_rows(k), with_dense_rows(v)
    kv, norm = (None if x is None else x.contiguous() for x in (kv, norm))
    G, V = v.shape[2:]
    chunks = chunks_of(call, q, cu_seqlens)
    tiles = tiles_of(q.shape[3], call.degree, q.device, q.dtype)
    gates = None if log_g is None else sum_gates(log_g, chunks)
    final_kv = final_norm = None
    if call.output_final_state:
        S = chunks.sequences.shape[0]
        final_kv = q.new_empty(S, G, tiles.P, V, dtype=torch.float32)
        final_norm = q.new_empty(S, G, tiles.P, dtype=torch.float32)
    if kv is None and final_kv is None and not has_later_chunks(call, chunks, q.shape[1]):
        states = no_states(q)
    else:
        states = states_before_chunks(
            call, k, v, gates, chunks, tiles, (kv, norm), (final_kv, final_norm),
            has_norm=call.normalize or call.output_final_state,
        )  # fmt: skip
    out, inverse, is_live = read_out(
        call, q, k, v, gates, states, chunks, tiles, operands_of(q),
        has_initial=kv is not None, rounding=_rounding(q, tiles),
    )  # fmt: skip
    kept = states if call.keeps_states else (None, None)
    return Forward(out, final_kv, final_norm, inverse, is_live, *kept)
