"""Backward of the chunked form: states and their gradients, then gradients of the tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from longhaul.kernels.common.triton.chunking import Chunks, Gates, sum_gates
from longhaul.kernels.common.triton.launch import operands_of, with_dense_rows
from longhaul.kernels.power.call import Grads, PowerCall, Saved
from longhaul.kernels.power.triton.chunked.forward import (
    chunks_of,
    has_later_chunks,
    no_states,
    states_before_chunks,
)
from longhaul.kernels.power.triton.chunked.key_gradient import key_gradient
from longhaul.kernels.power.triton.chunked.query_gradient import query_gradient
from longhaul.kernels.power.triton.chunked.state import States, accumulate
from longhaul.kernels.power.triton.chunked.sums import Sums, Tokens
from longhaul.kernels.power.triton.delta import row_delta
from longhaul.kernels.power.triton.features import Tiles, tiles_of
from longhaul.kernels.power.triton.gates import gate_gradient


def chunked_backward(
    call: PowerCall,
    saved: Saved,
    dout: Tensor | None,
    dkv: Tensor | None,
    dnorm: Tensor | None,
    needs: tuple[bool, ...],
) -> Grads:
    """Gradients of q, k, v, log_g and the initial state.

    The states S and their gradients dS exist at the same time. Where the forward pass has kept no
    S, an even number of key heads is processed in two halves, so that both together are no larger
    than one state per chunk.
    """
    q, k, v = (with_dense_rows(x) for x in (saved.q, saved.k, saved.v))
    has_output = dout is not None
    dout = torch.zeros_like(saved.out) if dout is None else with_dense_rows(dout)
    delta = row_delta(dout, saved.out, saved.is_live)
    if delta is None and dnorm is not None:
        delta = q.new_zeros(q.shape[:3], dtype=torch.float32)
    chunks = chunks_of(call, q, saved.cu_seqlens)
    dq = q.new_empty(q.shape)
    # Allocated after the first scan of states, where memory is at its peak.
    key_grads = cache(lambda: (k.new_empty(k.shape), v.new_empty(v.shape)))
    dlog_g = None
    if saved.log_g is not None and needs[3]:
        dlog_g = saved.log_g.new_empty(saved.log_g.shape)
    dinitial = []
    G, R = k.shape[2], q.shape[2] // k.shape[2]
    size = G // 2 if G % 2 == 0 and saved.chunk_kv is None else G
    for g in range(0, G, size):
        keys, queries = (2, g, size), (2, g * R, size * R)
        state = (1, g, size)
        dinitial.append(
            _backward_of_heads(
                call,
                Saved(
                    q.narrow(*queries),
                    k.narrow(*keys),
                    v.narrow(*keys),
                    _narrow(saved.log_g, keys),
                    _narrow(saved.kv, state),
                    _narrow(saved.norm, state),
                    saved.cu_seqlens,
                    saved.out,
                    _narrow(saved.final_kv, state),
                    _narrow(saved.final_norm, state),
                    _narrow(saved.inverse, queries),
                    None,
                    saved.chunk_kv,
                    saved.chunk_norm,
                ),
                chunks,
                dout.narrow(*queries),
                _narrow(delta, queries),
                has_output,
                _narrow(dkv, state),
                _narrow(dnorm, state),
                dq.narrow(*queries),
                key_grads,
                keys,
                None if dlog_g is None else dlog_g.narrow(*keys),
                needs,
            )
        )
    dkv0, dnorm0 = (
        None if parts[0] is None else torch.cat(parts, dim=1)
        for parts in zip(*dinitial, strict=True)
    )
    dk, dv = key_grads()
    grads = (dq, dk, dv, dlog_g, dkv0, dnorm0)
    return tuple(grad if need else None for grad, need in zip(grads, needs, strict=True))  # type: ignore[return-value]


def _narrow(x: Tensor | None, heads: tuple[int, int, int]) -> Tensor | None:
    return None if x is None else x.narrow(*heads).contiguous()


def _backward_of_heads(
    call: PowerCall,
    saved: Saved,
    chunks: Chunks,
    dout: Tensor,
    delta: Tensor | None,
    has_output: bool,
    dkv: Tensor | None,
    dnorm: Tensor | None,
    dq: Tensor,
    key_grads: Callable[[], tuple[Tensor, Tensor]],
    keys: tuple[int, int, int],
    dlog_g: Tensor | None,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None]:
    """Fill the gradients of some key heads; return the gradients of the initial state."""
    q, k, v = saved.q, saved.k, saved.v
    T, G = k.shape[1:3]
    needs_q, needs_kv, needs_gates = needs[0], needs[1] or needs[2], needs[3]
    tiles, operands = tiles_of(q.shape[3], call.degree, q.device, q.dtype), operands_of(q)
    gates = None if saved.log_g is None else sum_gates(saved.log_g, chunks)
    has_initial, has_final = saved.kv is not None, dkv is not None or dnorm is not None
    has_norm = call.normalize or dnorm is not None
    has_states = has_initial or has_final or has_later_chunks(call, chunks, T)

    states = dstates = no_states(q)
    products = None
    if saved.chunk_kv is not None and saved.chunk_norm is not None:
        states = States(saved.chunk_kv, saved.chunk_norm)
    elif has_states:
        states = states_before_chunks(
            call, k, v, gates, chunks, tiles, (saved.kv, saved.norm), (None, None),
            has_norm=has_norm,
        )  # fmt: skip
    q_dq = None
    if dlog_g is not None and has_output:
        q_dq = q.new_empty(q.shape[:3], dtype=torch.float32)
    if needs_q or q_dq is not None:
        query_gradient(
            call, q, k, v, dout, saved.inverse, delta, gates, states, chunks, tiles, operands,
            has_initial=has_initial, dq=dq, q_dq=q_dq,
        )  # fmt: skip
    dinitial: tuple[Tensor | None, Tensor | None] = (None, None)
    if has_states:
        dstates, dinitial, products = _state_gradients(
            call, saved, dout, delta, gates, states, chunks, tiles, dkv, dnorm, has_norm=has_norm
        )
    if needs_kv or needs_gates:
        dk, dv = (x.narrow(*keys) for x in key_grads())
        k_dk = k.new_empty(k.shape[0], G, T, dtype=torch.float32) if dlog_g is not None else None
        key_gradient(
            call, q, k, v, dout, saved.inverse, delta, gates, dstates, chunks, tiles, operands,
            has_final=has_final, has_norm=has_norm and has_states,
            dk=dk, dv=dv, k_dk=k_dk,
        )  # fmt: skip
        if dlog_g is not None and k_dk is not None and saved.log_g is not None:
            if products is None:
                products = k.new_zeros(chunks.num, G, dtype=torch.float64)
            gate_gradient(q_dq, k_dk, products, saved.log_g, chunks, call.degree, dlog_g)
    return dinitial


def _state_gradients(
    call: PowerCall,
    saved: Saved,
    dout: Tensor,
    delta: Tensor | None,
    gates: Gates | None,
    states: States,
    chunks: Chunks,
    tiles: Tiles,
    dkv: Tensor | None,
    dnorm: Tensor | None,
    *,
    has_norm: bool,
) -> tuple[States, tuple[Tensor | None, Tensor | None], Tensor | None]:
    """dS after every chunk, eq. (13); gradients of the initial state; ⟨dS, S⟩ of eq. (19)."""
    sums = Sums(
        Tokens(saved.q, dout, saved.inverse, delta), gates, chunks, tiles, operands_of(saved.q),
        saved.k.shape[2], call.degree, factor=call.scale**call.degree, is_reverse=True,
    )  # fmt: skip
    dkv0, dnorm0 = (
        None if x is None else torch.zeros_like(x, dtype=torch.float32)
        for x in (saved.kv, saved.norm)
    )
    dstates, products = accumulate(
        sums, (dkv, dnorm), (dkv0, dnorm0), None if gates is None else states, has_norm=has_norm
    )
    if products is not None:
        # There is none at the end of a sequence yet, as no later chunk reads that state.
        end = chunks.sequences.sum(dim=1) - 1
        for dlast, last in ((dkv, saved.final_kv), (dnorm, saved.final_norm)):
            if dlast is not None and last is not None:
                products[end] += (dlast.double() * last).flatten(2).sum(dim=2)
    return dstates, (dkv0, dnorm0), products
