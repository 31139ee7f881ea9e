"""Gradients of the tokens of every chunk, (13) to (15), and of their gates.

Three kernels, since all of it at once would spill registers: products with states, pairs of tokens,
and what keys, queries and gates make of both.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from longhaul.kernels.common.triton.chunking import Chunks, load_chunk
from longhaul.kernels.common.triton.launch import candidates, config, launch
from longhaul.kernels.common.triton.rows import load_rows
from longhaul.kernels.delta.call import Gradients
from longhaul.kernels.delta.triton.decays import (
    decay_between,
    from_start,
    halves_at,
    is_in_half,
    load_gates,
    pairs_of_halves,
    sums,
    to_end,
)
from longhaul.kernels.delta.triton.prepare import Prepared
from longhaul.kernels.delta.triton.shapes import Shapes
from longhaul.kernels.delta.triton.walk import Walked, WalkedBack

# In one stage: Triton 3.6 and 3.7 would pipeline the next states over those that products still
# read, since sums read them too.
_ROWS = candidates(config(8, 1), config(4, 1))
_PAIRS = candidates(config(8, 1), config(4, 2), sm_90=1, sm_100=1)
_KEYS = candidates(config(8, 1), config(4, 1), sm_90=1, sm_100=1)


def token_gradients(
    shapes: Shapes, chunks: Chunks, q: Tensor | None, k: Tensor, v: Tensor, beta: Tensor | None,
    log_g: Tensor, prepared: Prepared, walked: Walked, back: WalkedBack, dout: Tensor | None,
    scale: float,
) -> Gradients:  # fmt: skip
    """Gradients of k, v, q, beta and log_g, where queries and keys have one for each value head."""
    B, T, H, V = v.shape
    K, C, blocks = shapes.K, shapes.meta["BLOCK_C"], shapes.blocks_of_keys
    erases, reads = beta is not None, dout is not None

    def scratch(width: int, is_there: bool) -> Tensor:
        return shapes.scratch(k, B, T, H, width) if is_there else k

    dk_end, dq_start, dw = scratch(K, True), scratch(K, reads), scratch(K, erases)
    dtotal = k.new_empty(chunks.num, H, K, dtype=torch.float32)
    launch(
        _delta_rows_kernel, lambda _: (chunks.num, H, triton.cdiv(K, shapes.meta["BLOCK"])), _ROWS,
        k if dout is None else dout, walked.states, walked.new, back.dstates, back.dnew,
        dk_end, dq_start, dw, dtotal, chunks.table, T, H, K, V,
        HAS_OUTPUT=reads, ERASES=erases, **shapes.meta,
    )  # fmt: skip
    dp, da = scratch(C, reads), scratch(C, erases)
    dv = torch.empty_like(v)
    dbeta = None if beta is None else torch.empty_like(beta, dtype=torch.float32)
    # Of one gate for all channels, sums that the blocks of keys and the pairs of tokens add up to.
    parts = 1 if shapes.meta["CHANNELS"] else blocks + 1
    dg = k.new_empty(parts, *log_g.shape, dtype=torch.float32)
    given = (beta, prepared.p, prepared.u, prepared.w, prepared.inverse, prepared.scores)
    launch(
        _delta_pairs_kernel, lambda _: (chunks.num, H), _PAIRS,
        *(k if x is None else x for x in (dout, k, v, log_g, *given)), walked.new, back.dnew,
        dw, dp, da, dv, k if dbeta is None else dbeta, dg[-1], chunks.table, T, H, shapes.G, K, V,
        HAS_OUTPUT=reads, ERASES=erases, **shapes.meta,
    )  # fmt: skip
    # Where heads of values share keys, gradients are summed before they are rounded.
    dk = k.new_empty(B, T, H, K, dtype=k.dtype if shapes.G == H else torch.float32)
    dq = torch.empty_like(dk) if reads else dk
    launch(
        _delta_keys_kernel, lambda _: (chunks.num, H, blocks), _KEYS,
        *(k if x is None else x for x in (q, k, beta)), log_g, prepared.total,
        dp, da, dk_end, dq_start, dw, dtotal,
        dk, dq, dg, dg.stride(0), chunks.table, T, H, shapes.G, K, scale,
        HAS_OUTPUT=reads, ERASES=erases, **shapes.meta,
    )  # fmt: skip
    dlog_g = dg[0] if parts == 1 else dg.sum(dim=0)
    return Gradients(dk, dv, dq if reads else None, dbeta, dlog_g, back.dinitial)


@triton.jit
def _delta_rows_kernel(
    dout_ptr, states_ptr, new_ptr, dstates_ptr, dnew_ptr, dk_end_ptr, dq_start_ptr, dw_ptr,
    dtotal_ptr, table_ptr, T, H, K, V,
    HAS_OUTPUT: tl.constexpr, ERASES: tl.constexpr,
    CHANNELS: tl.constexpr, LEVELS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    # Of some key channels, the products with the states before and after the chunk.
    chunk, h = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    _, batch, start, end, _, _ = load_chunk(table_ptr, chunk)
    if start >= end:
        return
    c, kk = tl.arange(0, BLOCK_C), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    is_token = c < end - start
    row = (batch * T + start) * H + h
    state_off = (chunk * H + h) * K * V
    dq_start = tl.zeros((BLOCK_C, BLOCK), tl.float32)
    dk_end = tl.zeros((BLOCK_C, BLOCK), tl.float32)
    dw = tl.zeros((BLOCK_C, BLOCK), tl.float32)
    dtotal = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, V, BLOCK):
        vv = first + tl.arange(0, BLOCK)
        state = load_rows(states_ptr + state_off, kk, kk < K, V, vv, V)
        dstate = load_rows(dstates_ptr + state_off, kk, kk < K, V, vv, V)
        dtotal += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), axis=1)
        new = load_rows(new_ptr + row * V, c, is_token, H * V, vv, V).to(DOT)
        dk_end += tl.dot(new, tl.trans(dstate), input_precision=PRECISION)
        if HAS_OUTPUT:
            dout = load_rows(dout_ptr + row * V, c, is_token, H * V, vv, V).to(DOT)
            dq_start += tl.dot(dout, tl.trans(state), input_precision=PRECISION)
        if ERASES:
            dnew = load_rows(dnew_ptr + row * V, c, is_token, H * V, vv, V)
            dw -= tl.dot(dnew, tl.trans(state), input_precision=PRECISION)
    at = row * K + c[:, None] * (H * K) + kk[None, :]
    is_number = is_token[:, None] & (kk < K)[None, :]
    tl.store(dk_end_ptr + at, dk_end.to(dk_end_ptr.dtype.element_ty), mask=is_number)
    tl.store(dtotal_ptr + (chunk * H + h) * K + kk, dtotal, mask=kk < K)
    if HAS_OUTPUT:
        tl.store(dq_start_ptr + at, dq_start.to(dq_start_ptr.dtype.element_ty), mask=is_number)
    if ERASES:
        tl.store(dw_ptr + at, dw.to(dw_ptr.dtype.element_ty), mask=is_number)


@triton.jit
def _delta_pairs_kernel(
    dout_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, p_ptr, u_ptr, w_ptr, inverse_ptr, scores_ptr, new_ptr,
    dnew_ptr, dw_ptr, dp_ptr, da_ptr, dv_ptr, dbeta_ptr, dg_ptr, table_ptr, T, H, G, K, V,
    HAS_OUTPUT: tl.constexpr, ERASES: tl.constexpr,
    CHANNELS: tl.constexpr, LEVELS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    # Gradients of values, write strengths and scores, of these without decays where one gate holds
    # for all channels. Each block of dW is overwritten with X_k.
    _, batch, start, end, _, _ = load_chunk(table_ptr, tl.program_id(0))
    if start >= end:
        return
    h = tl.program_id(1).to(tl.int64)
    c = tl.arange(0, BLOCK_C)
    t, i = c[:, None], c[None, :]
    is_token = c < end - start
    row = (batch * T + start) * H + h
    key = ((batch * T + start) * G + h // (H // G)) * K
    gate_off = (batch * T * H + h) * (K if CHANNELS else 1)
    pairs_at = row * BLOCK_C + t * (H * BLOCK_C) + i
    if not CHANNELS:
        g = load_gates(g_ptr + gate_off, start, end, H, c, c, K, CHANNELS)
    if ERASES:
        # T transposed: of tokens that are not there its columns are 0.
        inverse = tl.trans(tl.load(inverse_ptr + pairs_at, mask=is_token[:, None], other=0.0))
        beta = tl.load(beta_ptr + row + c * H, mask=is_token, other=0.0).to(tl.float32)[:, None]
        da = tl.zeros((BLOCK_C, BLOCK_C), tl.float32)
        dbeta = tl.zeros((BLOCK_C,), tl.float32)
    dp = tl.zeros((BLOCK_C, BLOCK_C), tl.float32)
    for first in range(0, V, BLOCK):
        vv = first + tl.arange(0, BLOCK)
        if HAS_OUTPUT:
            dout = load_rows(dout_ptr + row * V, c, is_token, H * V, vv, V).to(DOT)
            new = load_rows(new_ptr + row * V, c, is_token, H * V, vv, V).to(DOT)
            dp += tl.dot(dout, tl.trans(new), input_precision=PRECISION)
        dv = load_rows(dnew_ptr + row * V, c, is_token, H * V, vv, V).to(tl.float32)
        if ERASES:
            x_v = tl.dot(inverse, dv, input_precision=EXACT)
            v = load_rows(v_ptr + row * V, c, is_token, H * V, vv, V).to(tl.float32)
            u = load_rows(u_ptr + row * V, c, is_token, H * V, vv, V)
            da -= tl.dot(x_v.to(DOT), tl.trans(u), input_precision=PRECISION)
            dbeta += tl.sum(x_v * v, axis=1)
            dv = beta * x_v
        at = row * V + t * (H * V) + vv[None, :]
        is_value = is_token[:, None] & (vv < V)[None, :]
        tl.store(dv_ptr + at, dv.to(dv_ptr.dtype.element_ty), mask=is_value)
    if ERASES:
        for first in range(0, K, BLOCK_K):
            kk = first + tl.arange(0, BLOCK_K)
            if CHANNELS:
                g = load_gates(g_ptr + gate_off, start, end, H * K, c, kk, K, CHANNELS)
            at = row * K + t * (H * K) + kk[None, :]
            is_number = is_token[:, None] & (kk < K)[None, :]
            dw = tl.load(dw_ptr + at, mask=is_number, other=0.0).to(tl.float32)
            x_k = tl.dot(inverse, dw, input_precision=EXACT)
            tl.store(dw_ptr + at, x_k.to(dw_ptr.dtype.element_ty), mask=is_number)
            w = load_rows(w_ptr + row * K, c, is_token, H * K, kk, K)
            da -= tl.dot(x_k.to(DOT), tl.trans(w), input_precision=PRECISION)
            k = load_rows(k_ptr + key, c, is_token, G * K, kk, K).to(tl.float32)
            dbeta += tl.sum(x_k * k * from_start(g, c, CHANNELS, EXACT), axis=1)
    decay = tl.full((1, 1), 1.0, tl.float32)
    pairs = tl.zeros((BLOCK_C, BLOCK_C), tl.float32)  # score times its gradient
    if not CHANNELS:
        decay = decay_between(g, c)
    if HAS_OUTPUT:
        if not CHANNELS:
            p = tl.load(p_ptr + pairs_at, mask=is_token[:, None], other=0.0)
            pairs += dp * p.to(tl.float32)
        dp = (dp * decay).to(dp_ptr.dtype.element_ty)
        tl.store(dp_ptr + pairs_at, dp, mask=is_token[:, None])
    if ERASES:
        scores = tl.load(scores_ptr + pairs_at, mask=is_token[:, None], other=0.0).to(tl.float32)
        da = tl.where(t > i, da, 0.0)
        dbeta += tl.sum(da * scores, axis=1)
        tl.store(dbeta_ptr + row + c * H, dbeta, mask=is_token)
        da *= beta
        pairs += da * scores
        da = (da * decay).to(da_ptr.dtype.element_ty)
        tl.store(da_ptr + pairs_at, da, mask=is_token[:, None])
    if not CHANNELS:
        # Of each gate the pairs with a token on either side.
        crossing = tl.cumsum(pairs, axis=0, reverse=True)
        dg = tl.sum(tl.where(i < t, crossing, 0.0), axis=1)
        tl.store(dg_ptr + gate_off + (start + c) * H, dg, mask=is_token)


@triton.jit
def _delta_keys_kernel(
    q_ptr, k_ptr, beta_ptr, g_ptr, total_ptr, dp_ptr, da_ptr, dk_end_ptr, dq_start_ptr, x_k_ptr,
    dtotal_ptr, dk_ptr, dq_ptr, dg_ptr, dg_stride, table_ptr, T, H, G, K, scale,
    HAS_OUTPUT: tl.constexpr, ERASES: tl.constexpr,
    CHANNELS: tl.constexpr, LEVELS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    chunk, h = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    _, batch, start, end, _, _ = load_chunk(table_ptr, chunk)
    if start >= end:
        return
    c, kk = tl.arange(0, BLOCK_C), tl.program_id(2) * BLOCK_K + tl.arange(0, BLOCK_K)
    t, i = c[:, None], c[None, :]
    is_token = c < end - start
    is_number = is_token[:, None] & (kk < K)[None, :]
    row = (batch * T + start) * H + h
    key = ((batch * T + start) * G + h // (H // G)) * K
    own = row * K + t * (H * K) + kk[None, :]
    pairs_at = row * BLOCK_C + t * (H * BLOCK_C) + i
    width = K if CHANNELS else 1
    gate_off = (batch * T * H + h) * width
    g = load_gates(g_ptr + gate_off, start, end, H * width, c, kk, K, CHANNELS)
    k = load_rows(k_ptr + key, c, is_token, G * K, kk, K)

    # Keys and queries that meet the state before the chunk, or reach the one after it.
    starts = from_start(g, c, CHANNELS, EXACT)
    dk_end = tl.load(dk_end_ptr + own, mask=is_number, other=0.0).to(tl.float32)
    dk = dk_end * to_end(g, c, CHANNELS, EXACT)
    gate_end = dk * k.to(tl.float32)
    gate_start = tl.zeros((BLOCK_C, BLOCK_K), tl.float32)
    if ERASES:
        beta = tl.load(beta_ptr + row + c * H, mask=is_token, other=0.0).to(tl.float32)[:, None]
        x_k = tl.load(x_k_ptr + own, mask=is_number, other=0.0).to(tl.float32)
        dk_start = beta * x_k * starts
        dk += dk_start
        gate_start += dk_start * k.to(tl.float32)
        da = tl.load(da_ptr + pairs_at, mask=is_token[:, None], other=0.0)
    if HAS_OUTPUT:
        q = scale * load_rows(q_ptr + key, c, is_token, G * K, kk, K).to(tl.float32)
        dq = tl.load(dq_start_ptr + own, mask=is_number, other=0.0).to(tl.float32) * starts
        gate_start += dq * q
        dp = tl.load(dp_ptr + pairs_at, mask=is_token[:, None], other=0.0)

    # Pairs of tokens, and gates: one between two tokens, or between a token and an end, fades them.
    if CHANNELS:
        if HAS_OUTPUT:
            diagonal = tl.sum(tl.where(t == i, dp.to(tl.float32), 0.0), axis=1)[:, None]
            dk += diagonal * q
            dq += diagonal * k.to(tl.float32)
        dg = sums(i >= t, gate_start, EXACT) + sums(i < t, gate_end, EXACT)
        place = (chunk * H + h) * K + kk
        total = tl.load(total_ptr + place, mask=kk < K, other=0.0)
        dg += (total * tl.load(dtotal_ptr + place, mask=kk < K, other=0.0))[None, :]
        for level in range(0, LEVELS):
            later, earlier = halves_at(g, c, level, EXACT)
            meets = pairs_of_halves(c, level)
            k_earlier = (k * earlier).to(DOT)
            rows = tl.zeros((BLOCK_C, BLOCK_K), tl.float32)
            columns = tl.zeros((BLOCK_C, BLOCK_K), tl.float32)
            if HAS_OUTPUT:
                d = tl.where(meets, dp, 0.0)
                found = later * tl.dot(d, k_earlier, input_precision=PRECISION)
                dq += found
                rows += found * q
                q_later = (q * later).to(DOT)
                columns += earlier * tl.dot(tl.trans(d), q_later, input_precision=PRECISION)
            if ERASES:
                d = tl.where(meets, da, 0.0)
                found = later * tl.dot(d, k_earlier, input_precision=PRECISION)
                dk += found
                rows += found * k.to(tl.float32)
                k_later = (k * later).to(DOT)
                columns += earlier * tl.dot(tl.trans(d), k_later, input_precision=PRECISION)
            dk += columns
            is_own, columns = is_in_half(c, level), columns * k.to(tl.float32)
            dg += sums(is_own & (i >= t), rows, EXACT) + sums(is_own & (i < t), columns, EXACT)
        at = dg_ptr + gate_off + (start + t) * (H * K) + kk[None, :]
        tl.store(at, dg, mask=is_number)
    else:
        if HAS_OUTPUT:
            dq += tl.dot(dp, k.to(DOT), input_precision=PRECISION)
            dk += tl.dot(tl.trans(dp), q.to(DOT), input_precision=PRECISION)
        if ERASES:
            dk += tl.dot(da, k.to(DOT), input_precision=PRECISION)
            dk += tl.dot(tl.trans(da), k.to(DOT), input_precision=PRECISION)
        dtotal = tl.load(dtotal_ptr + (chunk * H + h) * K + kk, mask=kk < K, other=0.0)
        after = tl.sum(gate_start, axis=1)[None, :]
        before = tl.sum(gate_end, axis=1)[None, :]
        dg = tl.sum(tl.where(i >= t, after, before), axis=1)
        dg += tl.load(total_ptr + chunk * H + h) * tl.sum(dtotal, axis=0)
        dg_ptr += tl.program_id(2).to(tl.int64) * dg_stride
        tl.store(dg_ptr + gate_off + (start + c) * H, dg, mask=is_token)
    tl.store(dk_ptr + own, dk.to(dk_ptr.dtype.element_ty), mask=is_number)
    if HAS_OUTPUT:
        tl.store(dq_ptr + own, (scale * dq).to(dq_ptr.dtype.element_ty), mask=is_number)
