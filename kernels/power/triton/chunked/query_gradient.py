"""Gradients of queries in the chunked form.

With delta_t = dy_t·y_t, the gradient of a weight is dw_ti = (dy_t·v_i − delta_t) / den_t, eq. (11).
Matrix products take dy itself, and 1 / den multiplies the rows of the result.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from longhaul.kernels.common.triton.chunking import Chunks, Gates, exp2_flushed, load_chunk
from longhaul.kernels.common.triton.launch import Operands, block_of, launch, strides
from longhaul.kernels.common.triton.rows import load_rows, sum_of_products
from longhaul.kernels.power.call import PowerCall
from longhaul.kernels.power.triton.chunked.state import States
from longhaul.kernels.power.triton.features import (
    Tiles,
    in_pairs,
    norm_columns,
    norm_gradient,
    slots_of,
    state_gradient,
)
from longhaul.kernels.power.triton.powers import power
from longhaul.kernels.power.triton.tile_sizes import QUERY_GRADIENT


def query_gradient(
    call: PowerCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    inverse: Tensor | None,
    delta: Tensor | None,
    gates: Gates | None,
    states: States,
    chunks: Chunks,
    tiles: Tiles,
    operands: Operands,
    *,
    has_initial: bool,
    dq: Tensor,
    q_dq: Tensor | None,
) -> None:
    """Fill dq (B, T, H, K), eq. (12), and q·dq (B, T, H), from the state before each chunk."""
    T, H, K = q.shape[1:]
    G, V = v.shape[2:]
    is_narrow = max(K, V) <= 64 and call.degree < 4
    slots = slots_of(K, call.degree, q.device, tiles.at_once, not has_initial)
    unused = states.kv
    launch(
        _power_bwd_query_kernel,
        lambda meta: (chunks.num * triton.cdiv(chunks.size, meta["BLOCK_T"]), H),
        QUERY_GRADIENT.of(q.dtype, is_narrow=is_narrow), q, k, v, dout,
        unused if inverse is None else inverse, unused if delta is None else delta,
        unused if gates is None else gates.high, unused if gates is None else gates.low, states.kv,
        states.norm, dq, q_dq, chunks.table, slots.table, *strides(q, k, v, dout, dq), T, H, G, K,
        V, tiles.P, call.degree * call.scale**call.degree, chunks.size,
        NUM_SLOTS=triton.cdiv(K, tiles.tile),
        SLOT_BLOCKS=slots.num_blocks,
        IN_PAIRS=in_pairs(K, V, call.degree, q.dtype),
        DEGREE=call.degree,
        TILE=tiles.tile,
        AT_ONCE=tiles.at_once,
        BLOCK_K=block_of(K),
        BLOCK_V=block_of(V),
        NORM_COLUMNS=norm_columns(K),
        HAS_GATES=gates is not None,
        HAS_INITIAL=has_initial,
        NORMALIZE=call.normalize,
        DOT=operands.dtype,
        PRECISION=operands.precision,
    )  # fmt: skip


@triton.jit
def _power_bwd_query_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, inverse_ptr, delta_ptr, high_ptr, low_ptr, kv_ptr, norm_ptr,
    dq_ptr, q_dq_ptr, chunks_ptr, slots_ptr, stride_qb, stride_qt, stride_qh, stride_kb, stride_kt,
    stride_kh, stride_vb, stride_vt, stride_vh, stride_ob, stride_ot, stride_oh,
    stride_db, stride_dt, stride_dh, T, H, G, K, V, P, factor, chunk_size,
    NUM_SLOTS: tl.constexpr, SLOT_BLOCKS: tl.constexpr, IN_PAIRS: tl.constexpr,
    DEGREE: tl.constexpr, TILE: tl.constexpr,
    AT_ONCE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, NORM_COLUMNS: tl.constexpr, HAS_GATES: tl.constexpr,
    HAS_INITIAL: tl.constexpr, NORMALIZE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tl.static_assert(BLOCK_T % BLOCK_N == 0)
    per_chunk = tl.cdiv(chunk_size, BLOCK_T)
    chunk = (tl.program_id(0) // per_chunk).to(tl.int64)
    _, batch, start, end, sequence_start, _ = load_chunk(chunks_ptr, chunk)
    before = (tl.program_id(0) % per_chunk) * BLOCK_T
    length = (end - start).to(tl.int32)
    if before >= length:
        return
    h = tl.program_id(1).to(tl.int64)
    g = h // (H // G)
    t = tl.arange(0, BLOCK_T)
    n = tl.arange(0, BLOCK_N)
    kk = tl.arange(0, BLOCK_K)
    v = tl.arange(0, BLOCK_V)
    t_mask = t < length - before
    q_ptr += batch * stride_qb + (start + before) * stride_qt + h * stride_qh
    dout_ptr += batch * stride_ob + (start + before) * stride_ot + h * stride_oh
    dq_ptr += batch * stride_db + (start + before) * stride_dt + h * stride_dh
    k_ptr += batch * stride_kb + start * stride_kt + g * stride_kh
    v_ptr += batch * stride_vb + start * stride_vt + g * stride_vh
    gate_off = (batch * G + g) * T + start
    # A scalar and narrow offsets, which take fewer registers than wide ones.
    row_base = (batch * T + start + before) * H + h
    row_off = t * H

    dout = load_rows(dout_ptr, t, t_mask, stride_ot, v, V).to(DOT)
    delta = tl.zeros((BLOCK_T,), tl.float32)
    if NORMALIZE:
        delta = tl.load(delta_ptr + row_base + row_off, mask=t_mask, other=0.0)

    q = load_rows(q_ptr, t, t_mask, stride_qt, kk, K).to(DOT)

    # Step 1: the state.
    acc = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
    if (start > sequence_start) | HAS_INITIAL:
        kv_ptr += (chunk * G + g) * P * V
        norm_ptr += (chunk * G + g) * P
        acc = state_gradient(
            dout, -delta, q, q_ptr, t * stride_qt, t_mask, kv_ptr, norm_ptr, slots_ptr, K, V,
            NUM_SLOTS, SLOT_BLOCKS, DEGREE, TILE, AT_ONCE, IN_PAIRS, BLOCK_K, BLOCK_V, NORMALIZE,
            DOT, PRECISION,
        )  # fmt: skip
        if NORMALIZE and DEGREE == 2:
            product = norm_gradient(q, norm_ptr, K, TILE, BLOCK_K, NORM_COLUMNS, DOT, PRECISION)
            acc -= delta[:, None] * product
    first_high, first_low = 0.0, 0.0
    # All steps are multiplied by p at the end, but this one includes p already.
    acc *= 1 / DEGREE
    if HAS_GATES:
        first_high = tl.load(high_ptr + gate_off + before)
        first_low = tl.load(low_ptr + gate_off + before)
        acc *= exp2_flushed(first_high + first_low)

    # Step 2: earlier blocks of keys.
    for first in range(0, before, BLOCK_N):
        k_off = (first + n).to(tl.int64)
        k = load_rows(k_ptr, k_off, None, stride_kt, kk, K).to(DOT)
        value = load_rows(v_ptr, k_off, None, stride_vt, v, V).to(DOT)
        dscore = tl.dot(dout, tl.trans(value), input_precision=PRECISION) - delta[:, None]
        if DEGREE > 1:
            score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            dscore *= power(score, DEGREE - 1)
        if HAS_GATES:
            high = tl.load(high_ptr + gate_off + first + n)
            low = tl.load(low_ptr + gate_off + first + n)
            dscore *= exp2_flushed((first_high - high) + (first_low - low))[None, :]
        acc = tl.dot(dscore.to(DOT), k, acc, input_precision=PRECISION)

    # Step 3: the block's own keys.
    t_high, t_low = tl.zeros((BLOCK_T,), tl.float32), tl.zeros((BLOCK_T,), tl.float32)
    if HAS_GATES:
        t_high = tl.load(high_ptr + gate_off + before + t, mask=t_mask, other=0.0)
        t_low = tl.load(low_ptr + gate_off + before + t, mask=t_mask, other=0.0)
        acc *= exp2_flushed((t_high - first_high) + (t_low - first_low))[:, None]
    for first in range(0, BLOCK_T, BLOCK_N):
        n_mask = n < length - before - first
        k_off = (before + first + n).to(tl.int64)
        k = load_rows(k_ptr, k_off, n_mask, stride_kt, kk, K).to(DOT)
        value = load_rows(v_ptr, k_off, n_mask, stride_vt, v, V).to(DOT)
        dscore = tl.dot(dout, tl.trans(value), input_precision=PRECISION) - delta[:, None]
        if DEGREE > 1:
            score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            dscore *= power(score, DEGREE - 1)
        if HAS_GATES:
            high = tl.load(high_ptr + gate_off + before + first + n, mask=n_mask, other=0.0)
            low = tl.load(low_ptr + gate_off + before + first + n, mask=n_mask, other=0.0)
            dscore *= exp2_flushed(
                (t_high[:, None] - high[None, :]) + (t_low[:, None] - low[None, :])
            )
        dscore = tl.where(t[:, None] >= (first + n)[None, :], dscore, 0.0)
        acc = tl.dot(dscore.to(DOT), k, acc, input_precision=PRECISION)

    row_factor = tl.full((BLOCK_T,), 1.0, tl.float32) * factor
    if NORMALIZE:
        row_factor *= tl.load(inverse_ptr + row_base + row_off, mask=t_mask, other=0.0)
    acc *= row_factor[:, None]
    tl.store(
        dq_ptr + t[:, None] * stride_dt + kk[None, :],
        acc.to(dq_ptr.dtype.element_ty),
        mask=t_mask[:, None] & (kk < K)[None, :],
    )
    if q_dq_ptr is not None:
        # Loaded again, since keeping them would take registers from the loops.
        q = load_rows(q_ptr, t, t_mask, stride_qt, kk, K)
        product = sum_of_products(q.to(tl.float32), acc, 1)
        tl.store(q_dq_ptr + row_base + row_off, product, mask=t_mask)
