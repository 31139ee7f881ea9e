"""Gradients of keys and values in the chunked form, in one kernel.

Decays are factored at the last token e of a block of keys: G_C − G_e for the state after the chunk,
G_t − G_e for later queries, and G_e − G_i for the keys themselves. The block's own queries come
last and use a matrix of decays. dS is read once for dk and then once for dv, whose sum takes up
registers only from then on.
"""

from __future__ import annotations

import torch
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
    features,
    in_pairs,
    norm_columns,
    norm_gradient,
    slots_of,
    state_gradient,
)
from longhaul.kernels.power.triton.powers import power
from longhaul.kernels.power.triton.tile_sizes import KEY_GRADIENT


def key_gradient(
    call: PowerCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    inverse: Tensor | None,
    delta: Tensor | None,
    gates: Gates | None,
    dstates: States,
    chunks: Chunks,
    tiles: Tiles,
    operands: Operands,
    *,
    has_final: bool,
    has_norm: bool,
    dk: Tensor,
    dv: Tensor,
    k_dk: Tensor | None,
) -> None:
    """Fill dk, dv, eq. (14), and k·dk (B, G, T), from dS after each chunk."""
    T, H, K = q.shape[1:]
    G, V = v.shape[2:]
    slots = slots_of(K, call.degree, q.device, tiles.at_once, not has_final)
    # Two sums of 256 columns fit the registers only in the small blocks that float32 has.
    dtype = q.dtype if max(K, V) <= 128 else torch.float32
    unused = dstates.kv

    def grid(meta: dict[str, int]) -> tuple[int, ...]:
        return (chunks.num * triton.cdiv(chunks.size, meta["BLOCK_N"]), G)

    launch(
        _power_bwd_key_kernel, grid, KEY_GRADIENT.of(dtype, is_narrow=max(K, V) <= 64), q, k, v,
        dout, unused if inverse is None else inverse, unused if delta is None else delta,
        unused if gates is None else gates.high, unused if gates is None else gates.low, dstates.kv,
        dstates.norm, dk, dv, unused if k_dk is None else k_dk, chunks.table, tiles.table,
        slots.table, *strides(q, k, v, dout, dk, dv), T, H, G, K, V, tiles.P,
        call.scale**call.degree, chunks.size,
        NUM_BLOCKS=tiles.num_blocks,
        NUM_SLOTS=triton.cdiv(K, tiles.tile),
        SLOT_BLOCKS=slots.num_blocks,
        IN_PAIRS=in_pairs(K, V, call.degree, q.dtype),
        DEGREE=call.degree,
        TILE=tiles.tile,
        AT_ONCE=tiles.at_once,
        BLOCK_F=tiles.at_once * tiles.tile**call.degree,
        BLOCK_K=block_of(K),
        BLOCK_V=block_of(V),
        NORM_COLUMNS=norm_columns(K),
        HAS_GATES=gates is not None,
        HAS_FINAL=has_final,
        HAS_NORM=has_norm,
        HAS_PRODUCT=k_dk is not None,
        NORMALIZE=call.normalize,
        DOT=operands.dtype,
        PRECISION=operands.precision,
    )  # fmt: skip


@triton.jit
def _add_queries(
    dk, dv, k, v, q_ptr, dout_ptr, inverse_ptr, delta_ptr, high_ptr, low_ptr, row_off, gate_off,
    token, length, is_causal, from_high, from_low, stride_qt, stride_ot, H, K, V, factor,
    DEGREE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, HAS_GATES: tl.constexpr,
    NORMALIZE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk / p and dv with what a block of queries adds: to keys (rows) from queries (columns)."""
    mask = token < length
    kk = tl.arange(0, BLOCK_K)
    vv = tl.arange(0, BLOCK_V)
    q = load_rows(q_ptr, token.to(tl.int64), mask, stride_qt, kk, K).to(DOT)
    dout = load_rows(dout_ptr, token.to(tl.int64), mask, stride_ot, vv, V).to(DOT)
    weight = tl.full((1, token.shape[0]), 1.0, tl.float32) * factor
    if NORMALIZE:
        weight *= tl.load(inverse_ptr + row_off + token * H, mask=mask, other=0.0)[None, :]
    if HAS_GATES:
        high = tl.load(high_ptr + gate_off + token, mask=mask, other=0.0)[None, :]
        low = tl.load(low_ptr + gate_off + token, mask=mask, other=0.0)[None, :]
        weight = weight * exp2_flushed((high - from_high) + (low - from_low))
    score = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    if DEGREE > 1:
        weight = weight * power(score, DEGREE - 1)
    weight = tl.where(is_causal & mask[None, :], weight, 0.0)
    dv = tl.dot((weight * score).to(DOT), dout, dv, input_precision=PRECISION)
    dscore = tl.dot(v, tl.trans(dout), input_precision=PRECISION)
    if NORMALIZE:
        dscore -= tl.load(delta_ptr + row_off + token * H, mask=mask, other=0.0)[None, :]
    dk = tl.dot((weight * dscore).to(DOT), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def _power_bwd_key_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, inverse_ptr, delta_ptr, high_ptr, low_ptr, dkv_ptr, dnorm_ptr,
    dk_ptr, dv_ptr, k_dk_ptr, chunks_ptr, tiles_ptr, slots_ptr,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt,
    stride_vh, stride_ob, stride_ot, stride_oh, stride_dkb, stride_dkt, stride_dkh, stride_dvb,
    stride_dvt, stride_dvh, T, H, G, K, V, P, factor, chunk_size,
    NUM_BLOCKS: tl.constexpr, NUM_SLOTS: tl.constexpr, SLOT_BLOCKS: tl.constexpr,
    IN_PAIRS: tl.constexpr, DEGREE: tl.constexpr, TILE: tl.constexpr, AT_ONCE: tl.constexpr,
    BLOCK_F: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, NORM_COLUMNS: tl.constexpr, HAS_GATES: tl.constexpr,
    HAS_FINAL: tl.constexpr, HAS_NORM: tl.constexpr, HAS_PRODUCT: tl.constexpr,
    NORMALIZE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tl.static_assert(BLOCK_N % BLOCK_T == 0)
    per_chunk = tl.cdiv(chunk_size, BLOCK_N)
    chunk = (tl.program_id(0) // per_chunk).to(tl.int64)
    _, batch, start, end, _, sequence_end = load_chunk(chunks_ptr, chunk)
    before = (tl.program_id(0) % per_chunk) * BLOCK_N
    length = (end - start).to(tl.int32)
    if before >= length:
        return
    g = tl.program_id(1).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    t = tl.arange(0, BLOCK_T)
    kk = tl.arange(0, BLOCK_K)
    vv = tl.arange(0, BLOCK_V)
    n_mask = n < length - before
    k_ptr += batch * stride_kb + (start + before) * stride_kt + g * stride_kh
    v_ptr += batch * stride_vb + (start + before) * stride_vt + g * stride_vh
    gate_off = (batch * G + g) * T + start
    k = load_rows(k_ptr, n, n_mask, stride_kt, kk, K).to(DOT)
    v = load_rows(v_ptr, n, n_mask, stride_vt, vv, V).to(DOT)

    # Step 1: the gradient of the state after the chunk.
    dk = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    if (end < sequence_end) | HAS_FINAL:
        dkv_ptr += (chunk * G + g) * P * V
        dnorm_ptr += (chunk * G + g) * P
        ones = tl.full((BLOCK_N,), 1.0, tl.float32)
        dk = state_gradient(
            v, ones, k, k_ptr, n * stride_kt, n_mask, dkv_ptr, dnorm_ptr, slots_ptr, K, V,
            NUM_SLOTS, SLOT_BLOCKS, DEGREE, TILE, AT_ONCE, IN_PAIRS, BLOCK_K, BLOCK_V, HAS_NORM,
            DOT, PRECISION,
        )  # fmt: skip
        if HAS_NORM and DEGREE == 2:
            dk += norm_gradient(k, dnorm_ptr, K, TILE, BLOCK_K, NORM_COLUMNS, DOT, PRECISION)
        # All steps are multiplied by p at the end, but this one includes p already.
        dk *= 1 / DEGREE
        for block in range(NUM_BLOCKS):
            phi = features(
                k_ptr, n * stride_kt, n_mask, tiles_ptr, block, K,
                DEGREE, TILE, AT_ONCE, False, True, DOT,
            )  # fmt: skip
            f = block * BLOCK_F + tl.arange(0, BLOCK_F)
            dkv = load_rows(dkv_ptr, f, f < P, V, vv, V)
            dv = tl.dot(phi.to(DOT), dkv.to(DOT), dv, input_precision=PRECISION)

    last_high, last_low = 0.0, 0.0
    n_high, n_low = tl.zeros((BLOCK_N,), tl.float32), tl.zeros((BLOCK_N,), tl.float32)
    if HAS_GATES:
        last = gate_off + tl.minimum(before + BLOCK_N, length) - 1
        last_high, last_low = tl.load(high_ptr + last), tl.load(low_ptr + last)
        end_high = tl.load(high_ptr + gate_off + length - 1)
        end_low = tl.load(low_ptr + gate_off + length - 1)
        decay = exp2_flushed((end_high - last_high) + (end_low - last_low))
        dk *= decay
        dv *= decay

    # Step 2: later queries of the chunk, of every query head of the group.
    every = tl.full((BLOCK_N, BLOCK_T), True, tl.int1)
    repeats = H // G
    q_ptr += batch * stride_qb + start * stride_qt + g * repeats * stride_qh
    dout_ptr += batch * stride_ob + start * stride_ot + g * repeats * stride_oh
    row_off = (batch * T + start) * H + g * repeats
    for repeat in range(repeats):
        for first in range(before + BLOCK_N, length, BLOCK_T):
            dk, dv = _add_queries(
                dk, dv, k, v, q_ptr + repeat * stride_qh, dout_ptr + repeat * stride_oh,
                inverse_ptr, delta_ptr, high_ptr, low_ptr, row_off + repeat, gate_off, first + t,
                length, every, last_high, last_low, stride_qt, stride_ot, H, K, V, factor,
                DEGREE, BLOCK_K, BLOCK_V, HAS_GATES, NORMALIZE, DOT, PRECISION,
            )  # fmt: skip
    if HAS_GATES:
        n_high = tl.load(high_ptr + gate_off + before + n, mask=n_mask, other=0.0)
        n_low = tl.load(low_ptr + gate_off + before + n, mask=n_mask, other=0.0)
        decay = exp2_flushed((last_high - n_high) + (last_low - n_low))[:, None]
        dk *= decay
        dv *= decay

    # Step 3: the block's own queries.
    for repeat in range(repeats):
        for first in range(0, BLOCK_N, BLOCK_T):
            is_causal = (first + t)[None, :] >= n[:, None]
            dk, dv = _add_queries(
                dk, dv, k, v, q_ptr + repeat * stride_qh, dout_ptr + repeat * stride_oh,
                inverse_ptr, delta_ptr, high_ptr, low_ptr, row_off + repeat, gate_off,
                before + first + t, length, is_causal, n_high[:, None], n_low[:, None], stride_qt,
                stride_ot, H, K, V, factor,
                DEGREE, BLOCK_K, BLOCK_V, HAS_GATES, NORMALIZE, DOT, PRECISION,
            )  # fmt: skip

    dk *= DEGREE
    dk_ptr += batch * stride_dkb + (start + before) * stride_dkt + g * stride_dkh
    tl.store(
        dk_ptr + n[:, None] * stride_dkt + kk[None, :],
        dk.to(dk_ptr.dtype.element_ty),
        mask=n_mask[:, None] & (kk < K)[None, :],
    )
    dv_ptr += batch * stride_dvb + (start + before) * stride_dvt + g * stride_dvh
    tl.store(
        dv_ptr + n[:, None] * stride_dvt + vv[None, :],
        dv.to(dv_ptr.dtype.element_ty),
        mask=n_mask[:, None] & (vv < V)[None, :],
    )
    if HAS_PRODUCT:
        product = sum_of_products(k.to(tl.float32), dk, 1)
        tl.store(k_dk_ptr + gate_off + before + n, product, mask=n_mask)
