"""The chunked form: chunk states, scan, read-out; and the same three again for gradients."""

from __future__ import annotations

from math import sqrt

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
from longhaul.kernels.power.triton.delta import row_terms
from longhaul.kernels.power.triton.features import Tiles, tiles_of
from longhaul.kernels.power.triton.gates import gate_gradient
from longhaul.kernels.power.triton.key_gradient import key_gradient
from longhaul.kernels.power.triton.launch import operands_of, with_dense_rows
from longhaul.kernels.power.triton.query_gradient import query_gradient
from longhaul.kernels.power.triton.read import read_out
from longhaul.kernels.power.triton.sequences import Chunks, Gates, cut, sum_gates
from longhaul.kernels.power.triton.state import States, Tokens, chunk_states, scan


def _chunks_of(call: PowerCall, q: Tensor, cu_seqlens: Tensor | None) -> Chunks:
    B, T = q.shape[:2]
    size = T if call.form == "attention" else min(call.chunk_size, T)
    return cut(B, T, size, cu_seqlens, q.device)


def _read_dtype(q: Tensor) -> torch.dtype:
    # The scan carries float32; what a product would round anyway is stored rounded.
    return torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float32


def _rounding(q: Tensor, tiles: Tiles) -> float:
    """4 ε of eq. (16): of float32, or of operands with fewer bits, whose errors average out."""
    if q.dtype == torch.float32:
        return 4 * torch.finfo(torch.float32).eps
    bits = 8 if q.dtype == torch.bfloat16 else 10
    return 4 * 2.0**-bits / sqrt(tiles.P)


def _states(
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
    """What every chunk reads, eq. (9)."""
    parts = chunk_states(
        Tokens(k, v, None, None), gates, chunks, tiles, k.shape[2], operands_of(k),
        degree=call.degree, factor=1.0, to_end=True, has_norm=has_norm,
    )  # fmt: skip
    rest = (gates, chunks, tiles, k.shape[1], call.degree)
    kv, _ = scan(parts.kv, _read_dtype(k), initial[0], final[0], *rest, is_reverse=False)
    norm = parts.norm
    if has_norm:
        norm, _ = scan(norm, torch.float32, initial[1], final[1], *rest, is_reverse=False)
    return States(kv, norm)


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
    chunks = _chunks_of(call, q, cu_seqlens)
    tiles = tiles_of(q.shape[3], call.degree, q.device, q.dtype)
    gates = None if log_g is None else sum_gates(log_g, chunks)
    final_kv = final_norm = None
    if call.output_final_state:
        S = chunks.sequences.shape[0]
        final_kv = q.new_empty(S, G, tiles.P, V, dtype=torch.float32)
        final_norm = q.new_empty(S, G, tiles.P, dtype=torch.float32)
    if kv is None and final_kv is None and chunks.size >= q.shape[1]:
        states = _no_states(q)
    else:
        states = _states(
            call, k, v, gates, chunks, tiles, (kv, norm), (final_kv, final_norm),
            has_norm=call.normalize or call.output_final_state,
        )  # fmt: skip
    out, inverse, is_live = read_out(
        call, q, k, v, gates, states, chunks, tiles, operands_of(q),
        has_initial=kv is not None, rounding=_rounding(q, tiles),
    )  # fmt: skip
    return Forward(out, final_kv, final_norm, inverse, is_live)


def final_state(
    call: PowerCall,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None,
    kv: Tensor | None,
    norm: Tensor | None,
    cu_seqlens: Tensor | None,
) -> PowerState:
    """The state after the last token of every sequence: chunk states and scan, nothing is read."""
    k, v = with_dense_rows(k), with_dense_rows(v)
    kv, norm = (None if x is None else x.contiguous() for x in (kv, norm))
    chunks = _chunks_of(call, k, cu_seqlens)
    tiles = tiles_of(k.shape[3], call.degree, k.device, k.dtype)
    gates = None if log_g is None else sum_gates(log_g, chunks)
    S, (G, V) = chunks.sequences.shape[0], v.shape[2:]
    final = PowerState(
        k.new_empty(S, G, tiles.P, V, dtype=torch.float32),
        k.new_empty(S, G, tiles.P, dtype=torch.float32),
    )
    _states(call, k, v, gates, chunks, tiles, (kv, norm), (final.kv, final.norm), has_norm=True)
    return final


def final_state_backward(
    call: PowerCall,
    saved: SavedState,
    dkv: Tensor | None,
    dnorm: Tensor | None,
) -> StateGrads:
    """Gradients of k, v, log_g and the initial state.

    The kernels of dk and dv take what lies inside a chunk along with the state, so the whole op
    runs backward here, on queries and outputs that are zero.
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


def _no_states(q: Tensor) -> States:
    """A single chunk with nothing before it reads none."""
    return States(q.new_empty(0, dtype=_read_dtype(q)), q.new_empty(0, dtype=torch.float32))


def chunked_backward(
    call: PowerCall,
    saved: Saved,
    dout: Tensor | None,
    dkv: Tensor | None,
    dnorm: Tensor | None,
    needs: tuple[bool, ...],
) -> Grads:
    """Gradients of q, k, v, log_g and the initial state.

    Two arrays of states are alive at a time, S and dS. Heads are taken in two halves, so that both
    arrays together are no larger than one state per chunk.
    """
    q, k, v = (with_dense_rows(x) for x in (saved.q, saved.k, saved.v))
    dout = torch.zeros_like(saved.out) if dout is None else with_dense_rows(dout)
    pull, change = row_terms(dout, saved.out, saved.is_live)
    if pull is None and dnorm is not None:
        pull = torch.zeros_like(change)
    chunks = _chunks_of(call, q, saved.cu_seqlens)
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    dlog_g = None
    if saved.log_g is not None and needs[3]:
        dlog_g = saved.log_g.new_empty(saved.log_g.shape)
    dinitial = []
    G, R = k.shape[2], q.shape[2] // k.shape[2]
    size = G // 2 if G % 2 == 0 else G
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
                ),
                chunks,
                dout.narrow(*queries),
                _narrow(pull, queries),
                change.narrow(*queries).contiguous(),
                _narrow(dkv, state),
                _narrow(dnorm, state),
                (dq.narrow(*queries), dk.narrow(*keys), dv.narrow(*keys)),
                None if dlog_g is None else dlog_g.narrow(*keys),
                needs,
            )
        )
    dkv0, dnorm0 = (
        None if parts[0] is None else torch.cat(parts, dim=1)
        for parts in zip(*dinitial, strict=True)
    )
    grads = (dq, dk, dv, dlog_g, dkv0, dnorm0)
    return tuple(grad if need else None for grad, need in zip(grads, needs, strict=True))  # type: ignore[return-value]


def _narrow(x: Tensor | None, heads: tuple[int, int, int]) -> Tensor | None:
    return None if x is None else x.narrow(*heads).contiguous()


def _backward_of_heads(
    call: PowerCall,
    saved: Saved,
    chunks: Chunks,
    dout: Tensor,
    pull: Tensor | None,
    change: Tensor,
    dkv: Tensor | None,
    dnorm: Tensor | None,
    grads: tuple[Tensor, Tensor, Tensor],
    dlog_g: Tensor | None,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None]:
    """Fill the gradients of some heads; return those of the initial state."""
    q, k, v = saved.q, saved.k, saved.v
    T, G = k.shape[1:3]
    needs_q, needs_kv, needs_gates = needs[0], needs[1] or needs[2], needs[3]
    tiles, operands = tiles_of(q.shape[3], call.degree, q.device, q.dtype), operands_of(q)
    gates = None if saved.log_g is None else sum_gates(saved.log_g, chunks)
    has_initial, has_final = saved.kv is not None, dkv is not None or dnorm is not None
    has_norm = call.normalize or dnorm is not None
    has_states = has_initial or has_final or chunks.size < T

    states = dstates = _no_states(q)
    products = k.new_zeros(chunks.num, G, dtype=torch.float64)
    if has_states:
        states = _states(
            call, k, v, gates, chunks, tiles, (saved.kv, saved.norm), (None, None),
            has_norm=has_norm,
        )  # fmt: skip
    if needs_q:
        query_gradient(
            call, q, k, v, dout, saved.inverse, pull, gates, states, chunks, tiles, operands,
            has_initial=has_initial, dq=grads[0],
        )  # fmt: skip
    dinitial: tuple[Tensor | None, Tensor | None] = (None, None)
    if has_states:
        dstates, dinitial, products = _state_gradients(
            call, saved, dout, pull, gates, states, chunks, tiles, dkv, dnorm, has_norm=has_norm
        )
    if needs_kv or needs_gates:
        k_dk = k.new_empty(k.shape[0], G, T, dtype=torch.float32) if dlog_g is not None else None
        key_gradient(
            call, q, k, v, dout, saved.inverse, pull, gates, dstates, chunks, tiles, operands,
            has_final=has_final, has_norm=has_norm and has_states,
            dk=grads[1] if needs[1] or needs_gates else None, dv=grads[2] if needs[2] else None,
            k_dk=k_dk,
        )  # fmt: skip
        if dlog_g is not None and k_dk is not None and saved.log_g is not None:
            gate_gradient(change, k_dk, products, saved.log_g, chunks, call.degree, dlog_g)
    return dinitial


def _state_gradients(
    call: PowerCall,
    saved: Saved,
    dout: Tensor,
    pull: Tensor | None,
    gates: Gates | None,
    states: States,
    chunks: Chunks,
    tiles: Tiles,
    dkv: Tensor | None,
    dnorm: Tensor | None,
    *,
    has_norm: bool,
) -> tuple[States, tuple[Tensor | None, Tensor | None], Tensor]:
    """dS after every chunk, eq. (13), before the first, and ⟨dS, S⟩ of eq. (19)."""
    parts = chunk_states(
        Tokens(saved.q, dout, saved.inverse, pull), gates, chunks, tiles, saved.k.shape[2],
        operands_of(saved.q), degree=call.degree, factor=call.scale**call.degree, to_end=False,
        has_norm=has_norm,
    )  # fmt: skip
    rest = (gates, chunks, tiles, saved.k.shape[1], call.degree)
    products = parts.kv.new_zeros(parts.kv.shape[:2], dtype=torch.float64)
    dinitial: list[Tensor | None] = []
    results = []
    for part, read, first, initial, last, dlast, is_there in (
        (parts.kv, _read_dtype(saved.q), states.kv, saved.kv, saved.final_kv, dkv, True),
        (parts.norm, torch.float32, states.norm, saved.norm, saved.final_norm, dnorm, has_norm),
    ):
        dfirst = None if initial is None else torch.zeros_like(initial, dtype=torch.float32)
        dinitial.append(dfirst)
        if not is_there:
            results.append(part)
            continue
        result, product = scan(
            part,
            read,
            dlast,
            dfirst,
            *rest,
            is_reverse=True,
            other=None if gates is None else first,
        )
        results.append(result)
        if product is not None:
            products += product
        if dlast is not None and last is not None:
            # The sequence's own end: no later chunk reads that state.
            end = chunks.sequences.sum(dim=1) - 1
            products[end] += (dlast.double() * last).flatten(2).sum(dim=2)
    return States(*results), (dinitial[0], dinitial[1]), products
