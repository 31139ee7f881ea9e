"""Gradients of the tokens of every chunk, (13) to (15), and of their gates."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from longhaul.kernels.common.triton.chunking import Chunks, load_chunk
from longhaul.kernels.common.triton.rows import load_rows
from longhaul.kernels.delta.call import Gradients
from longhaul.kernels.delta.triton.decays import (
    decay_between,
    faded_scores,
    from_start,
    halves_at,
    inverse_of_unit_lower,
    load_gates,
    over_chunk,
    pairs_at,
    to_end,
)
from longhaul.kernels.delta.triton.prepare import Prepared
from longhaul.kernels.delta.triton.shapes import Shapes
from longhaul.kernels.delta.triton.walk import Walked, WalkedBack


def token_gradients(
    shapes: Shapes, chunks: Chunks, q: Tensor | None, k: Tensor, v: Tensor, beta: Tensor | None,
    log_g: Tensor, prepared: Prepared, walked: Walked, back: WalkedBack, dout: Tensor | None,
    scale: float,
) -> Gradients:  # fmt: skip
    """Gradients of k, v, q, beta and log_g, where queries and keys have one for each value head."""
    B, T, H, V = v.shape
    dk = k.new_empty(B, T, H, shapes.K, dtype=torch.float32)
    dq = None if dout is None else torch.empty_like(dk)
    dv = torch.empty_like(v, dtype=torch.float32)
    dbeta = None if beta is None else torch.empty_like(beta, dtype=torch.float32)
    dg = torch.empty_like(log_g, dtype=torch.float32)
    given = (k if x is None else x for x in (q, beta, dout, prepared.p, prepared.u, prepared.w))
    _delta_gradients_kernel[(chunks.num, H)](
        k, v, log_g, *given, walked.states, walked.new, back.dstates, back.dnew,
        dk, *(dk if x is None else x for x in (dq, dbeta)), dv, dg,
        chunks.table, T, H, shapes.G, shapes.K, V, scale,
        HAS_OUTPUT=dout is not None, ERASES=beta is not None, **shapes.meta,
        num_warps=8, num_stages=1,
    )  # fmt: skip
    return Gradients(dk, dv, dq, dbeta, dg, back.dinitial)


@triton.jit
def _delta_gradients_kernel(
    k_ptr, v_ptr, g_ptr, q_ptr, beta_ptr, dout_ptr, p_ptr, u_ptr, w_ptr, states_ptr, new_ptr,
    dstates_ptr, dnew_ptr, dk_ptr, dq_ptr, dbeta_ptr, dv_ptr, dg_ptr, table_ptr, T, H, G, K, V,
    scale, HAS_OUTPUT: tl.constexpr, ERASES: tl.constexpr, CHANNELS: tl.constexpr,
    LEVELS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    chunk, h = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    _, batch, start, end, _, _ = load_chunk(table_ptr, chunk)
    if start >= end:
        return
    c, kk = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_K)
    t, i = c[:, None], c[None, :]
    is_token = c < end - start
    row = (batch * T + start) * H + h
    key = ((batch * T + start) * G + h // (H // G)) * K
    g_width = K if CHANNELS else 1
    gate_off = (batch * T * H + h) * g_width
    g, g_after = load_gates(g_ptr + gate_off, start, end, H * g_width, c, kk, K, CHANNELS, BLOCK_C)
    between = g
    if not CHANNELS:
        between = decay_between(g, c)
    k = load_rows(k_ptr + key, c, is_token, G * K, kk, K).to(tl.float32)
    inverse = tl.zeros((BLOCK_C, BLOCK_C), tl.float32)
    kk_scores = inverse
    beta = tl.zeros((BLOCK_C, 1), tl.float32)
    if ERASES:
        beta = tl.load(beta_ptr + row + c * H, mask=is_token, other=0.0).to(tl.float32)[:, None]
        kk_scores = faded_scores(
            k.to(DOT), k.to(DOT), g, g_after, between, c,
            CHANNELS, LEVELS, BLOCK_C, BLOCK_K, DOT, PRECISION,
        )  # fmt: skip
        kk_scores = tl.where(t > i, kk_scores, 0.0)
        inverse = inverse_of_unit_lower(beta * kk_scores, c, LEVELS, EXACT)

    # Sums over the columns of values.
    dp = tl.zeros((BLOCK_C, BLOCK_C), tl.float32)
    da = tl.zeros((BLOCK_C, BLOCK_C), tl.float32)
    dq_start = tl.zeros((BLOCK_C, BLOCK_K), tl.float32)
    dk_end = tl.zeros((BLOCK_C, BLOCK_K), tl.float32)
    dw = tl.zeros((BLOCK_C, BLOCK_K), tl.float32)
    dtotal = tl.zeros((BLOCK_K,), tl.float32)
    dbeta = tl.zeros((BLOCK_C,), tl.float32)
    for first in range(0, V, BLOCK_V):
        vv = first + tl.arange(0, BLOCK_V)
        is_column = (vv < V)[None, :]
        at = (chunk * H + h) * K * V + kk[:, None] * V + vv[None, :]
        is_place = (kk < K)[:, None] & is_column
        state = tl.load(states_ptr + at, mask=is_place, other=0.0)
        dstate = tl.load(dstates_ptr + at, mask=is_place, other=0.0)
        dtotal += tl.sum(state * dstate, axis=1)
        new = load_rows(new_ptr + row * V, c, is_token, H * V, vv, V).to(DOT)
        dk_end += tl.dot(new, tl.trans(dstate.to(DOT)), input_precision=PRECISION)
        if HAS_OUTPUT:
            dout = load_rows(dout_ptr + row * V, c, is_token, H * V, vv, V).to(tl.float32)
            dout = (scale * dout).to(DOT)
            dp += tl.dot(dout, tl.trans(new), input_precision=PRECISION)
            dq_start += tl.dot(dout, tl.trans(state.to(DOT)), input_precision=PRECISION)
        dnew = load_rows(dnew_ptr + row * V, c, is_token, H * V, vv, V).to(DOT)
        dv = dnew.to(tl.float32)
        if ERASES:
            dw -= tl.dot(dnew, tl.trans(state.to(DOT)), input_precision=PRECISION)
            x_v = tl.dot(tl.trans(inverse), dv, input_precision=EXACT)
            v = load_rows(v_ptr + row * V, c, is_token, H * V, vv, V).to(tl.float32)
            u = load_rows(u_ptr + row * V, c, is_token, H * V, vv, V).to(DOT)
            da -= tl.dot(x_v.to(DOT), tl.trans(u), input_precision=PRECISION)
            dbeta += tl.sum(x_v * v, axis=1)
            dv = beta * x_v
        at = row * V + c[:, None] * (H * V) + vv[None, :]
        tl.store(dv_ptr + at, dv, mask=is_token[:, None] & is_column)

    # Keys and queries that meet the state before the chunk, or reach the one after it.
    starts, ends = from_start(g, CHANNELS), to_end(g_after, CHANNELS)
    k_end = k * ends
    dk = dk_end * ends
    gate_start = tl.zeros((BLOCK_C, BLOCK_K), tl.float32)
    dq = tl.zeros((BLOCK_C, BLOCK_K), tl.float32)
    q = dq
    dp = tl.where(t >= i, dp, 0.0)
    pairs = tl.zeros((BLOCK_C, BLOCK_C), tl.float32)  # score times its gradient
    if HAS_OUTPUT:
        q = load_rows(q_ptr + key, c, is_token, G * K, kk, K).to(tl.float32)
        dq = dq_start * starts
        gate_start = dq * q
        if not CHANNELS:
            p = load_rows(p_ptr + row * BLOCK_C, c, is_token, H * BLOCK_C, c, BLOCK_C)
            pairs = dp * p.to(tl.float32)
    if ERASES:
        x_k = tl.dot(tl.trans(inverse), dw, input_precision=EXACT)
        w = load_rows(w_ptr + row * K, c, is_token, H * K, kk, K).to(DOT)
        da -= tl.dot(x_k.to(DOT), tl.trans(w), input_precision=PRECISION)
        da = tl.where(t > i, da, 0.0)
        k_start = k * starts
        dbeta += tl.sum(da * kk_scores, axis=1) + tl.sum(x_k * k_start, axis=1)
        tl.store(dbeta_ptr + row + c * H, dbeta, mask=is_token)
        da = beta * da
        dk += beta * x_k * starts
        gate_start += beta * x_k * k_start
        pairs += da * kk_scores
    gate_end = dk_end * k_end

    # Pairs of tokens, and gates: one between two tokens, or between a token and an end, fades them.
    up_to = tl.where(i >= t, 1.0, 0.0)  # row j: tokens from j on
    before = tl.where(i < t, 1.0, 0.0)  # row j: tokens before j
    if CHANNELS:
        own = tl.sum(tl.where(t == i, dp, 0.0), axis=1)[:, None]
        dk += own * q
        dq += own * k
        dg = tl.dot(up_to, gate_start, input_precision="ieee")
        dg += tl.dot(before, gate_end, input_precision="ieee")
        dg += (dtotal * tl.sum(over_chunk(g, CHANNELS), axis=1))[None, :]
        for level in tl.static_range(LEVELS):
            later, earlier = halves_at(g, g_after, c, 1 << level, BLOCK_C, BLOCK_K)
            is_pair = pairs_at(c, 1 << level)
            k_earlier = (k * earlier).to(DOT)
            rows = tl.zeros((BLOCK_C, BLOCK_K), tl.float32)
            columns = rows
            if HAS_OUTPUT:
                d = tl.where(is_pair, dp, 0.0).to(DOT)
                found = later * tl.dot(d, k_earlier, input_precision=PRECISION)
                dq += found
                rows += found * q
                q_later = (q * later).to(DOT)
                columns += earlier * tl.dot(tl.trans(d), q_later, input_precision=PRECISION)
            if ERASES:
                d = tl.where(is_pair, da, 0.0).to(DOT)
                found = later * tl.dot(d, k_earlier, input_precision=PRECISION)
                dk += found
                rows += found * k
                k_later = (k * later).to(DOT)
                columns += earlier * tl.dot(tl.trans(d), k_later, input_precision=PRECISION)
            dk += columns
            is_half = t // (1 << level) == i // (1 << level)
            dg += tl.dot(tl.where(is_half, up_to, 0.0), rows, input_precision="ieee")
            dg += tl.dot(tl.where(is_half, before, 0.0), columns * k, input_precision="ieee")
        at = dg_ptr + gate_off + (start + t) * (H * K) + kk[None, :]
        tl.store(at, dg, mask=is_token[:, None] & (kk < K)[None, :])
    else:
        if HAS_OUTPUT:
            d = (dp * between).to(DOT)
            dq += tl.dot(d, k.to(DOT), input_precision=PRECISION)
            dk += tl.dot(tl.trans(d), q.to(DOT), input_precision=PRECISION)
        if ERASES:
            d = (da * between).to(DOT)
            dk += tl.dot(d, k.to(DOT), input_precision=PRECISION)
            dk += tl.dot(tl.trans(d), k.to(DOT), input_precision=PRECISION)
        total = tl.sum(tl.sum(over_chunk(g, CHANNELS), axis=1), axis=0)
        dg = tl.sum(dtotal, axis=0) * total
        dg += tl.sum(up_to * tl.sum(gate_start, axis=1)[None, :], axis=1)
        dg += tl.sum(before * tl.sum(gate_end, axis=1)[None, :], axis=1)
        # Of each gate the pairs with a token on either side.
        crossing = tl.dot(up_to, pairs, input_precision="ieee")
        dg += tl.sum(tl.where(i < t, crossing, 0.0), axis=1)
        tl.store(dg_ptr + gate_off + (start + c) * H, dg, mask=is_token)
    at = row * K + t * (H * K) + kk[None, :]
    is_number = is_token[:, None] & (kk < K)[None, :]
    tl.store(dk_ptr + at, dk, mask=is_number)
    if HAS_OUTPUT:
        tl.store(dq_ptr + at, dq, mask=is_number)
