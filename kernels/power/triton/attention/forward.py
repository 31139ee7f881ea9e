"""Forward of the fused attention form: scores every pair of tokens, stores no T × T matrix.

A weight is z^p, where z is (q̂·k) times the p-th root of the decay, and each row is scaled by its
largest |z|, eq. (17). So no power overflows, and a pair of tokens needs no exponential.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from longhaul.kernels.common.triton.chunking import (
    LOG2_SMALLEST,
    Chunks,
    Gates,
    cut,
    load_chunk,
    sum_gates,
)
from longhaul.kernels.common.triton.launch import (
    block_of,
    launch,
    operands_of,
    strides,
    with_dense_rows,
)
from longhaul.kernels.common.triton.rows import load_rows, rounded_weights
from longhaul.kernels.power.call import PowerCall
from longhaul.kernels.power.triton.powers import power
from longhaul.kernels.power.triton.tile_sizes import ATTENTION_FORWARD, Blocks
from longhaul.kernels.shapes import DENOMINATOR_FLOOR, HIGHEST_UNSCALED_DEGREE, SMALLEST_UNIT

_SMALLEST_UNIT = tl.constexpr(SMALLEST_UNIT)


def attention_forward(
    call: PowerCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Output (B, T, H, V), den^(−1/p) and whether den is above its floor, both (B, T, H) or None.

    The root cannot overflow, while den^(−1) could.
    """
    q, k, v = with_dense_rows(q), with_dense_rows(k), with_dense_rows(v)
    B, T, H = q.shape[:3]
    G, V = v.shape[2:]
    block = ATTENTION_FORWARD.of(q, v)
    queries = longest_first(B, T, block.queries, cu_seqlens, q.device)
    gates = to_end = None
    if log_g is not None:
        gates = sum_gates(log_g, cut(B, T, T, cu_seqlens, q.device))
        to_end = roots_to_end(gates, cut(B, T, block.keys, cu_seqlens, q.device), call.degree)
    out = q.new_empty(B, T, H, V)
    inverse = is_live = None
    if call.normalize:
        inverse = q.new_empty(B, T, H, dtype=torch.float32)
        is_live = torch.empty_like(inverse, dtype=torch.bool)
    launch(
        _power_fwd_attention_kernel,
        lambda _: (queries.num * H,),
        block.candidates, q, k, v, out, inverse, is_live, None if gates is None else gates.high,
        None if gates is None else gates.low, to_end, queries.table, call.scale,
        _floor_root(call.degree), T, H, H // G, *strides(q, k, v),
        **constants_of(call, q, v, block),
    )  # fmt: skip
    return out, inverse, is_live


def _floor_root(degree: int) -> float:
    """The p-th root of the smallest denominator, of scores above every score of a dead row."""
    is_scaled = degree > HIGHEST_UNSCALED_DEGREE
    return SMALLEST_UNIT if is_scaled else float(DENOMINATOR_FLOOR ** (1 / degree))


def constants_of(call: PowerCall, q: Tensor, v: Tensor, block: Blocks) -> dict[str, Any]:
    """Compile-time constants of the kernels."""
    operands = operands_of(q)
    return {
        "K": q.shape[3],
        "V": v.shape[3],
        "DEGREE": call.degree,
        "BLOCK_M": block.queries,
        "BLOCK_N": block.keys,
        "BLOCK_K": block_of(q.shape[3]),
        "BLOCK_V": block_of(v.shape[3]),
        "DOT": operands.dtype,
        "PRECISION": operands.precision,
    }


def longest_first(
    B: int, T: int, size: int, cu_seqlens: Tensor | None, device: torch.device
) -> Chunks:
    """Blocks of queries, those with the most keys first, so that no long one starts late."""
    if cu_seqlens is None:
        return _rows_longest_first(B, T, size, device)
    return _sorted(cut(B, T, size, cu_seqlens, device))


@cache  # as the table that it sorts: see chunking.py
def _rows_longest_first(B: int, T: int, size: int, device: torch.device) -> Chunks:
    rows = _sorted(cut(B, T, size, None, torch.device("cpu")))
    return rows._replace(table=rows.table.to(device), sequences=rows.sequences.to(device))


def _sorted(chunks: Chunks) -> Chunks:
    before = chunks.table[:, 2] - chunks.table[:, 4]
    return chunks._replace(table=chunks.table[before.argsort(descending=True)])


def roots_to_end(gates: Gates, blocks: Chunks, degree: int) -> Tensor:
    """exp((G_e − G_i)/p) from every token i to the last token e of its block, (B, G, T) float32."""
    G, T = gates.high.shape[1:]
    to_end = torch.empty_like(gates.high)
    _power_fwd_roots_kernel[(blocks.num, G)](
        *gates, to_end, blocks.table, T, G, DEGREE=degree, BLOCK=blocks.size, num_warps=1
    )  # fmt: skip
    return to_end


@triton.jit
def _power_fwd_roots_kernel(
    high_ptr, low_ptr, to_end_ptr, table_ptr, T, G, DEGREE: tl.constexpr, BLOCK: tl.constexpr
):
    _, batch, start, end, _, _ = load_chunk(table_ptr, tl.program_id(0))
    first = (batch * G + tl.program_id(1)) * T + start
    i = tl.arange(0, BLOCK)
    mask = i < (end - start)
    last = first + end - start - 1
    # The table of a packed call may end with empty blocks, at the end of all gates.
    high_e = tl.load(high_ptr + last, mask=start < end, other=0.0)
    low_e = tl.load(low_ptr + last, mask=start < end, other=0.0)
    high = tl.load(high_ptr + first + i, mask=mask, other=0.0)
    low = tl.load(low_ptr + first + i, mask=mask, other=0.0)
    tl.store(to_end_ptr + first + i, decay_root(high_e - high, low_e - low, DEGREE), mask=mask)


@triton.jit
def decay_root(high, low, DEGREE: tl.constexpr):
    """The p-th root of the decay 2^(high + low), 0 where the decay is flushed: README, section 6.

    Future tokens, which are masked later, get 1 so that they cannot overflow.
    """
    log2_decay = tl.minimum(high + low, 0.0)
    return tl.where(log2_decay < LOG2_SMALLEST, 0.0, tl.exp2(log2_decay * (1 / DEGREE)))


@triton.jit
def _unit_above(x):
    """The smallest power of two ≥ x. Dividing by a power of two is exact."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x007FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def _one_over_unit(unit):
    return (0x7F000000 - unit.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def _add_block(acc, total, unit, z, factor, v, DEGREE: tl.constexpr, HAS_TOTAL: tl.constexpr,
               DOT: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Add keys with weights (factor · z)^p to the sums of w v and of w, which are in unit^p."""
    if DEGREE == 1:
        w = z * factor
    else:
        new_unit = _unit_above(tl.maximum(unit, tl.max(tl.abs(z), axis=1) * factor))
        one_over = _one_over_unit(new_unit)
        w = power(z * (factor * one_over)[:, None], DEGREE)
        rescale = power(unit * one_over, DEGREE)
        acc *= rescale[:, None]
        total *= rescale
        unit = new_unit
    w = rounded_weights(w, DOT, PRECISION)
    if HAS_TOTAL:
        total += tl.sum(w, axis=1)
    acc += tl.dot(w.to(DOT), v, input_precision=PRECISION)
    return acc, total, unit


@triton.jit
def _power_fwd_attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, inverse_ptr, is_live_ptr, high_ptr, low_ptr, to_end_ptr,
    table_ptr, scale, floor_root, T, H, REPEAT,
    stride_q_b, stride_q_t, stride_q_h, stride_k_b, stride_k_t, stride_k_h,
    stride_v_b, stride_v_t, stride_v_h,
    K: tl.constexpr, V: tl.constexpr, DEGREE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tl.static_assert(BLOCK_M % BLOCK_N == 0)
    HAS_TOTAL: tl.constexpr = inverse_ptr is not None
    WHOLE_K: tl.constexpr = None if K == BLOCK_K else K
    WHOLE_V: tl.constexpr = None if V == BLOCK_V else V
    chunk, h = tl.program_id(0) // H, (tl.program_id(0) % H).to(tl.int64)
    _, batch, start, end, first, _ = load_chunk(table_ptr, chunk)
    if start >= end:
        return
    g = h // REPEAT
    length = (end - start).to(tl.int32)
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    kk = tl.arange(0, BLOCK_K)
    vv = tl.arange(0, BLOCK_V)
    # Move pointers to the block's first query and to the first key of its sequence.
    q_ptr += batch * stride_q_b + start * stride_q_t + h * stride_q_h
    k_ptr += batch * stride_k_b + first * stride_k_t + g * stride_k_h
    v_ptr += batch * stride_v_b + first * stride_v_t + g * stride_v_h
    gate_off = (batch * (H // REPEAT) + g) * T
    row_off = (batch * T + start + m) * H + h

    q = load_rows(q_ptr, m, m < length, stride_q_t, kk, K).to(DOT)
    acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    unit = tl.full((BLOCK_M,), _SMALLEST_UNIT, tl.float32)
    if high_ptr is not None:
        high_ptr += gate_off
        low_ptr += gate_off
        to_end_ptr += gate_off + first
        high_b, low_b = tl.load(high_ptr + start), tl.load(low_ptr + start)
        high_m = tl.load(high_ptr + start + m, mask=m < length, other=0.0)
        low_m = tl.load(low_ptr + start + m, mask=m < length, other=0.0)

    # Keys before the block. The root of the decay to b, the block's first token, eq. (5), has two
    # factors: from the key to the end of its block of keys, from a table, and from there to b.
    factor = 1.0
    last = first + (BLOCK_N - 1)
    for _ in range(((start - first) // BLOCK_N).to(tl.int32)):
        k = load_rows(k_ptr, n, None, stride_k_t, kk, WHOLE_K).to(DOT)
        v = load_rows(v_ptr, n, None, stride_v_t, vv, WHOLE_V).to(DOT)
        z = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if high_ptr is not None:
            factor = decay_root(
                high_b - tl.load(high_ptr + last), low_b - tl.load(low_ptr + last), DEGREE
            )
            z *= tl.load(to_end_ptr + n)[None, :]
            to_end_ptr += BLOCK_N
            last += BLOCK_N
        acc, total, unit = _add_block(
            acc, total, unit, z, factor, v, DEGREE, HAS_TOTAL, DOT, PRECISION
        )
        k_ptr += BLOCK_N * stride_k_t
        v_ptr += BLOCK_N * stride_v_t
    if high_ptr is not None:
        # The root of the decay from b to the query is common to the row, so its unit takes it.
        from_start = decay_root(high_m - high_b, low_m - low_b, DEGREE)
        if DEGREE == 1:
            acc *= from_start[:, None]
            total *= from_start
        else:
            unit *= from_start

    # The block's own keys, with a matrix of decays.
    d = tl.arange(0, BLOCK_D)
    for block in range(0, tl.cdiv(length, BLOCK_D)):
        i = block * BLOCK_D + d
        left = length - block * BLOCK_D
        k = load_rows(k_ptr, d, d < left, stride_k_t, kk, K).to(DOT)
        v = load_rows(v_ptr, d, d < left, stride_v_t, vv, V).to(DOT)
        z = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if high_ptr is not None:
            high_d = tl.load(high_ptr + start + i, mask=i < length, other=0.0)
            low_d = tl.load(low_ptr + start + i, mask=i < length, other=0.0)
            z *= decay_root(
                high_m[:, None] - high_d[None, :], low_m[:, None] - low_d[None, :], DEGREE
            )
        z = tl.where(i[None, :] <= m[:, None], z, 0.0)
        acc, total, unit = _add_block(
            acc, total, unit, z, 1.0, v, DEGREE, HAS_TOTAL, DOT, PRECISION
        )
        k_ptr += BLOCK_D * stride_k_t
        v_ptr += BLOCK_D * stride_v_t

    if DEGREE == 1:
        acc *= scale
        if HAS_TOTAL:
            denominator = total * scale
            is_live = tl.abs(denominator) >= floor_root
            inverse = 1.0 / tl.where(is_live, denominator, floor_root)
            acc *= inverse[:, None]
    else:
        unit *= tl.abs(scale)
        if HAS_TOTAL:
            some = tl.where(total > 0.0, total, 1.0)
            root = tl.exp2(tl.log2(some) * (1 / DEGREE))
            # A Newton step, because exp2 and log2 are approximations.
            root *= 1.0 + (some / power(root, DEGREE) - 1.0) / DEGREE
            is_live = (total > 0.0) & (unit * root >= floor_root)
            inverse = 1.0 / tl.where(is_live, unit * root, floor_root)
            acc *= tl.where(is_live, 1.0 / some, power(unit * inverse, DEGREE))[:, None]
        else:
            # Multiplying by one factor at a time overflows only if the result does.
            for _ in tl.static_range(DEGREE):
                acc *= unit[:, None]
    if HAS_TOTAL:
        tl.store(inverse_ptr + row_off, inverse, mask=m < length)
        tl.store(is_live_ptr + row_off, is_live, mask=m < length)
    tl.store(
        out_ptr + row_off[:, None] * V + vv[None, :],
        acc.to(out_ptr.dtype.element_ty),
        mask=(m < length)[:, None] & (vv < V)[None, :],
    )
