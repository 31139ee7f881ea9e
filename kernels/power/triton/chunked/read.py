"""Outputs of the chunked form: read the state, add attention inside the chunk, divide."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from longhaul.kernels.common.triton.chunking import Chunks, Gates, exp2_flushed, load_chunk
from longhaul.kernels.common.triton.launch import Operands, block_of, launch, strides
from longhaul.kernels.common.triton.rows import load_rows, rounded_weights, sum_of_products
from longhaul.kernels.power.call import PowerCall
from longhaul.kernels.power.triton.chunked.state import States
from longhaul.kernels.power.triton.features import (
    Tiles,
    features,
    load_norm_columns,
    norm_columns,
    times_matrix,
)
from longhaul.kernels.power.triton.powers import power
from longhaul.kernels.power.triton.tile_sizes import READ
from longhaul.kernels.shapes import DENOMINATOR_FLOOR

_FLOOR = tl.constexpr(DENOMINATOR_FLOOR)


def read_out(
    call: PowerCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates | None,
    states: States,
    chunks: Chunks,
    tiles: Tiles,
    operands: Operands,
    *,
    has_initial: bool,
    rounding: float,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Outputs (B, T, H, V), 1 / denominator, and whether the denominator is above its floor."""
    B, T, H, K = q.shape
    G, V = v.shape[2:]
    out = q.new_empty(B, T, H, V)
    inverse = q.new_empty(B, T, H, dtype=torch.float32) if call.normalize else None
    is_live = q.new_empty(B, T, H, dtype=torch.bool) if call.normalize else None
    is_narrow = max(K, V) <= 64 and call.degree < 4
    block_v = min(block_of(V), 128 if K <= 128 else 64)
    launch(
        _power_fwd_read_kernel,
        lambda meta: (
            chunks.num * triton.cdiv(chunks.size, meta["BLOCK_T"]),
            H,
            triton.cdiv(V, block_v),
        ),
        READ.of(q.dtype, is_narrow=is_narrow), q, k, v, states.kv if gates is None else gates.high,
        states.kv if gates is None else gates.low, states.kv, states.norm, out,
        out if inverse is None else inverse, out if is_live is None else is_live.view(torch.uint8),
        chunks.table, tiles.table, *strides(q, k, v), T, H, G, K, V, tiles.P, call.scale,
        call.scale**call.degree, rounding, chunks.size,
        NUM_BLOCKS=tiles.num_blocks,
        DEGREE=call.degree,
        TILE=tiles.tile,
        AT_ONCE=tiles.at_once,
        BLOCK_F=tiles.at_once * tiles.tile**call.degree,
        BLOCK_K=block_of(K),
        BLOCK_V=block_v,
        NORM_COLUMNS=norm_columns(K),
        HAS_GATES=gates is not None,
        HAS_INITIAL=has_initial,
        NORMALIZE=call.normalize,
        DOT=operands.dtype,
        PRECISION=operands.precision,
    )  # fmt: skip
    return out, inverse, is_live


@triton.jit
def _power_fwd_read_kernel(
    q_ptr, k_ptr, v_ptr, high_ptr, low_ptr, kv_ptr, norm_ptr, out_ptr, inverse_ptr, is_live_ptr,
    chunks_ptr, tiles_ptr, stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh,
    stride_vb, stride_vt, stride_vh, T, H, G, K, V, P, scale, state_scale, rounding, chunk_size,
    NUM_BLOCKS: tl.constexpr, DEGREE: tl.constexpr, TILE: tl.constexpr, AT_ONCE: tl.constexpr,
    BLOCK_F: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, NORM_COLUMNS: tl.constexpr, HAS_GATES: tl.constexpr,
    HAS_INITIAL: tl.constexpr, NORMALIZE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Steps: the state, then earlier blocks of keys, then the block's own keys. Decays are factored
    # at the block's first token b, eq. (5): G_b and G_b − G_i first, G_t − G_b last.
    tl.static_assert(BLOCK_T % BLOCK_N == 0)
    per_chunk = tl.cdiv(chunk_size, BLOCK_T)
    chunk = (tl.program_id(0) // per_chunk).to(tl.int64)
    _, batch, start, end, sequence_start, _ = load_chunk(chunks_ptr, chunk)
    before = (tl.program_id(0) % per_chunk) * BLOCK_T  # tokens of the chunk before the block
    length = (end - start).to(tl.int32)
    if before >= length:
        return
    h = tl.program_id(1).to(tl.int64)
    g = h // (H // G)
    t = tl.arange(0, BLOCK_T)
    n = tl.arange(0, BLOCK_N)
    kk = tl.arange(0, BLOCK_K)
    v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    t_mask = t < length - before
    q_ptr += batch * stride_qb + (start + before) * stride_qt + h * stride_qh
    k_ptr += batch * stride_kb + start * stride_kt + g * stride_kh
    v_ptr += batch * stride_vb + start * stride_vt + g * stride_vh
    gate_off = (batch * G + g) * T + start

    q = load_rows(q_ptr, t, t_mask, stride_qt, kk, K).to(DOT)
    acc = tl.zeros((BLOCK_T, BLOCK_V), tl.float32)
    den = tl.zeros((BLOCK_T,), tl.float32)
    norm_square = 0.0
    has_state = (start > sequence_start) | HAS_INITIAL
    kv_ptr += (chunk * G + g) * P * V
    norm_ptr += (chunk * G + g) * P
    if NORMALIZE and DEGREE <= 2:  # noqa: SIM102, a compile-time condition
        # In float32, because eq. (16) depends on the accuracy of the denominator.
        if has_state:
            if DEGREE == 1:
                norm = tl.load(norm_ptr + kk, mask=kk < K, other=0.0)
                den = tl.sum(q.to(tl.float32) * norm[None, :], axis=1)
            else:
                for first in tl.static_range(0, BLOCK_K, NORM_COLUMNS):
                    j = first + tl.arange(0, NORM_COLUMNS)
                    matrix = load_norm_columns(norm_ptr, kk[:, None], j[None, :], K, TILE)
                    part = q
                    if NORM_COLUMNS < BLOCK_K:
                        part = load_rows(q_ptr, t, t_mask, stride_qt, j, K)
                    product = times_matrix(q, matrix, DOT, PRECISION)
                    den += sum_of_products(product, part.to(tl.float32), 1)
                    norm_square += tl.sum(matrix * matrix)
    for block in range(0, tl.where(has_state, NUM_BLOCKS, 0)):
        phi = features(
            q_ptr, t * stride_qt, t_mask, tiles_ptr, block, K,
            DEGREE, TILE, AT_ONCE, False, True, DOT,
        )  # fmt: skip
        f = block * BLOCK_F + tl.arange(0, BLOCK_F)
        kv = load_rows(kv_ptr, f, f < P, V, v, V)
        acc = tl.dot(phi.to(DOT), kv.to(DOT), acc, input_precision=PRECISION)
        if NORMALIZE and DEGREE > 2:
            norm = tl.load(norm_ptr + f, mask=f < P, other=0.0)
            den += sum_of_products(phi.to(tl.float32), norm[None, :], 1)
            tile = block * AT_ONCE + tl.arange(0, AT_ONCE)
            multiplicity = tl.load(tiles_ptr + tile * (DEGREE + 1) + DEGREE).to(tl.float32)
            norms = tl.reshape(norm, (AT_ONCE, BLOCK_F // AT_ONCE))
            norm_square += sum_of_products(sum_of_products(norms, norms, 1), multiplicity, 0)

    first_high, first_low = 0.0, 0.0
    from_start = state_scale
    if HAS_GATES:
        first_high = tl.load(high_ptr + gate_off + before)
        first_low = tl.load(low_ptr + gate_off + before)
        from_start *= exp2_flushed(first_high + first_low)
    acc *= from_start
    den *= from_start

    for first in range(0, before, BLOCK_N):
        k_off = (first + n).to(tl.int64)
        k = load_rows(k_ptr, k_off, None, stride_kt, kk, K).to(DOT)
        value = load_rows(v_ptr, k_off, None, stride_vt, v, V).to(DOT)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        decay = tl.full((BLOCK_N,), 1.0, tl.float32) * state_scale
        if HAS_GATES:
            high = tl.load(high_ptr + gate_off + first + n)
            low = tl.load(low_ptr + gate_off + first + n)
            decay *= exp2_flushed((first_high - high) + (first_low - low))
        weight = power(score, DEGREE) * decay[None, :]
        weight = rounded_weights(weight, DOT, PRECISION)
        acc = tl.dot(weight.to(DOT), value, acc, input_precision=PRECISION)
        if NORMALIZE:
            den += tl.sum(weight, axis=1)

    t_high, t_low = tl.zeros((BLOCK_T,), tl.float32), tl.zeros((BLOCK_T,), tl.float32)
    if HAS_GATES:
        t_high = tl.load(high_ptr + gate_off + before + t, mask=t_mask, other=0.0)
        t_low = tl.load(low_ptr + gate_off + before + t, mask=t_mask, other=0.0)
        since_first = exp2_flushed((t_high - first_high) + (t_low - first_low))
        acc *= since_first[:, None]
        den *= since_first
    for first in range(0, BLOCK_T, BLOCK_N):
        n_mask = n < length - before - first
        k_off = (before + first + n).to(tl.int64)
        k = load_rows(k_ptr, k_off, n_mask, stride_kt, kk, K).to(DOT)
        value = load_rows(v_ptr, k_off, n_mask, stride_vt, v, V).to(DOT)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        weight = power(score, DEGREE) * state_scale
        if HAS_GATES:
            high = tl.load(high_ptr + gate_off + before + first + n, mask=n_mask, other=0.0)
            low = tl.load(low_ptr + gate_off + before + first + n, mask=n_mask, other=0.0)
            weight *= exp2_flushed(
                (t_high[:, None] - high[None, :]) + (t_low[:, None] - low[None, :])
            )
        weight = tl.where(t[:, None] >= (first + n)[None, :], weight, 0.0)
        weight = rounded_weights(weight, DOT, PRECISION)
        acc = tl.dot(weight.to(DOT), value, acc, input_precision=PRECISION)
        if NORMALIZE:
            den += tl.sum(weight, axis=1)

    row_off = (batch * T + start + before + t) * H + h
    if NORMALIZE:
        floor = tl.full((BLOCK_T,), _FLOOR, tl.float32)
        size = den
        if DEGREE == 1:
            size = tl.abs(den)
        else:
            q32 = q.to(tl.float32) * scale
            bound = power(sum_of_products(q32, q32, 1), DEGREE // 2) * tl.sqrt(norm_square)
            if HAS_GATES:
                bound *= exp2_flushed(t_high + t_low)
            floor = tl.maximum(floor, rounding * bound)
        live = size >= floor
        inverse = 1.0 / tl.where(live, den, floor)
        acc *= inverse[:, None]
        if tl.program_id(2) == 0:
            tl.store(inverse_ptr + row_off, inverse, mask=t_mask)
            tl.store(is_live_ptr + row_off, live.to(tl.uint8), mask=t_mask)
    tl.store(
        out_ptr + row_off[:, None] * V + v[None, :],
        acc.to(out_ptr.dtype.element_ty),
        mask=t_mask[:, None] & (v < V)[None, :],
    )
