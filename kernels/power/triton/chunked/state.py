"""States of chunks, and the scan that accumulates them over chunks, in either direction of time.

The same kernels compute the states S of the forward pass, eq. (9), and their gradients dS,
eq. (13), from other tokens with other weights and in the other direction.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from longhaul.kernels.power.triton.chunking import Chunks, Gates, exp2_flushed, load_chunk
from longhaul.kernels.power.triton.features import (
    Tiles,
    features,
    matrix_offsets,
    times_matrix,
)
from longhaul.kernels.power.triton.launch import Operands, block_of, launch
from longhaul.kernels.power.triton.powers import sum_of_products
from longhaul.kernels.power.triton.tile_sizes import STATE


class States(NamedTuple):
    """One state per chunk: the state before the chunk, or the gradient of the state after it."""

    kv: Tensor  # (chunks, G, P, V) in the dtype of the products that read it
    norm: Tensor  # (chunks, G, P) float32; empty if no denominator is needed


class Tokens(NamedTuple):
    """The terms of a chunk's sums: Σ_t decay_t φ(x_t) [y_weight_t y_t, norm_weight_t]."""

    x: Tensor  # (B, T, heads, K), heads = G or H
    y: Tensor  # (B, T, heads, V)
    inverse: Tensor | None  # (B, T, H): weight of y; None means 1
    delta: Tensor | None  # (B, T, H): −delta · inverse is the weight of the norm; None means 1


def chunk_states(
    tokens: Tokens,
    gates: Gates | None,
    chunks: Chunks,
    tiles: Tiles,
    num_heads: int,
    operands: Operands,
    *,
    degree: int,
    factor: float,
    to_end: bool,
    has_norm: bool,
    needs_all: bool,
) -> States:
    """The sums that every chunk adds to a state, float32, times `factor`.

    With `to_end` every token decays to the end of its chunk, eq. (9), and the weight of the norm is
    1. Otherwise the decay is from the start of the chunk to the token, eq. (13), and the weights
    include inverse and −delta.

    Without `needs_all` the sums of each sequence's last chunk, or of its first if not `to_end`, are
    left uninitialised: only the state after the sequence, or before it, would include them.
    """
    x, y = tokens.x, tokens.y
    T, K, V = x.shape[1], x.shape[3], y.shape[3]
    G = num_heads
    kv = x.new_empty(chunks.num, G, tiles.P, V, dtype=torch.float32)
    norm = x.new_empty((chunks.num, G, tiles.P) if has_norm else (0,), dtype=torch.float32)
    features_at_once = tiles.at_once * tiles.tile**degree
    block_v = min(block_of(V), 128)
    unused = kv
    is_narrow = features_at_once <= 128 and block_v <= 64
    launch(
        _power_fwd_state_kernel,
        lambda _: (chunks.num * tiles.num_blocks, triton.cdiv(V, block_v), G),
        STATE.of(x.dtype, is_narrow=is_narrow),
        x,
        y,
        unused if tokens.inverse is None else tokens.inverse,
        unused if tokens.delta is None else tokens.delta,
        unused if gates is None else gates.high,
        unused if gates is None else gates.low,
        kv,
        norm,
        chunks.table,
        tiles.table,
        *x.stride()[:3],
        *y.stride()[:3],
        T,
        G,
        K,
        V,
        tiles.P,
        factor,
        NUM_BLOCKS=tiles.num_blocks,
        REPEAT=x.shape[2] // G,
        DEGREE=degree,
        TILE=tiles.tile,
        AT_ONCE=tiles.at_once,
        BLOCK_F=features_at_once,
        BLOCK_V=block_v,
        HAS_GATES=gates is not None,
        HAS_INVERSE=tokens.inverse is not None,
        HAS_DELTA=tokens.delta is not None,
        HAS_NORM=has_norm and degree > 2,
        TO_END=to_end,
        NEEDS_ALL=needs_all,
        DOT=operands.dtype,
        PRECISION=operands.precision,
    )
    if has_norm and degree <= 2:
        _power_fwd_norm_kernel[(chunks.num, G)](
            x,
            unused if tokens.inverse is None else tokens.inverse,
            unused if tokens.delta is None else tokens.delta,
            unused if gates is None else gates.high,
            unused if gates is None else gates.low,
            norm,
            chunks.table,
            *x.stride()[:3],
            T,
            G,
            K,
            tiles.P,
            factor,
            REPEAT=x.shape[2] // G,
            DEGREE=degree,
            TILE=tiles.tile,
            BLOCK_T=64 if K <= 64 else 32,
            BLOCK_K=block_of(K),
            HAS_GATES=gates is not None,
            HAS_INVERSE=tokens.inverse is not None,
            HAS_DELTA=tokens.delta is not None,
            TO_END=to_end,
            NEEDS_ALL=needs_all,
            DOT=operands.dtype,
            PRECISION=operands.precision,
            num_warps=4 if K <= 64 else 8,
        )
    return States(kv, norm)


@triton.jit
def _weight(
    high_ptr, low_ptr, inverse_ptr, gate_off, row_off, token, length, stride_row,
    HAS_GATES: tl.constexpr, HAS_INVERSE: tl.constexpr, TO_END: tl.constexpr,
):  # fmt: skip
    """The weight of each token of a chunk, 0 beyond its end."""
    mask = token < length
    weight = tl.where(mask, 1.0, 0.0)
    if HAS_GATES:
        high = tl.load(high_ptr + gate_off + token, mask=mask, other=0.0)
        low = tl.load(low_ptr + gate_off + token, mask=mask, other=0.0)
        if TO_END:
            last_off = gate_off + tl.maximum(length - 1, 0)
            high = tl.load(high_ptr + last_off) - high
            low = tl.load(low_ptr + last_off) - low
        weight *= exp2_flushed(high + low)
    if HAS_INVERSE:
        weight *= tl.load(inverse_ptr + row_off + token * stride_row, mask=mask, other=0.0)
    return weight


@triton.jit
def _is_unread(
    start, end, sequence_start, sequence_end, TO_END: tl.constexpr, NEEDS_ALL: tl.constexpr
):
    """Whether nothing reads the sum of a chunk, or the chunk is empty."""
    if NEEDS_ALL:
        return start >= end
    elif TO_END:  # noqa: RET505
        return end >= sequence_end
    else:
        return (start >= end) | (start <= sequence_start)


@triton.jit
def _power_fwd_norm_kernel(
    x_ptr, inverse_ptr, delta_ptr, high_ptr, low_ptr, norm_ptr, chunks_ptr,
    stride_xb, stride_xt, stride_xh, T, G, K, P, factor,
    REPEAT: tl.constexpr, DEGREE: tl.constexpr, TILE: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr, HAS_GATES: tl.constexpr, HAS_INVERSE: tl.constexpr,
    HAS_DELTA: tl.constexpr, TO_END: tl.constexpr, NEEDS_ALL: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    # Σ_t weight_t x_t at degree 1; at degree 2 one half of the symmetric Σ_t weight_t x_t x_tᵀ.
    chunk = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1).to(tl.int64)
    _, batch, start, end, sequence_start, sequence_end = load_chunk(chunks_ptr, chunk)
    if _is_unread(start, end, sequence_start, sequence_end, TO_END, NEEDS_ALL):
        return
    length = (end - start).to(tl.int32)
    t = tl.arange(0, BLOCK_T)
    kk = tl.arange(0, BLOCK_K)
    gate_off = (batch * G + g) * T + start
    norm_ptr += (chunk * G + g) * P
    vector = tl.zeros((BLOCK_K,), tl.float32)
    matrix = tl.zeros((BLOCK_K, BLOCK_K), tl.float32)
    for repeat in range(REPEAT):
        head = g * REPEAT + repeat
        row_off = (batch * T + start) * (G * REPEAT) + head
        for first in range(0, length, BLOCK_T):
            token = first + t
            mask = token < length
            x_off = batch * stride_xb + (start + first) * stride_xt + head * stride_xh
            x = tl.load(
                x_ptr + x_off + t[:, None] * stride_xt + kk[None, :],
                mask=mask[:, None] & (kk < K)[None, :],
                other=0.0,
            )
            weight = _weight(
                high_ptr, low_ptr, inverse_ptr, gate_off, row_off, token, length, G * REPEAT,
                HAS_GATES, HAS_INVERSE, TO_END,
            )  # fmt: skip
            if HAS_DELTA:
                weight *= -tl.load(
                    delta_ptr + row_off + token * (G * REPEAT), mask=mask, other=0.0
                )  # fmt: skip
            weighted = x.to(tl.float32) * weight[:, None]
            if DEGREE == 1:
                vector += tl.sum(weighted, axis=0)
            else:
                matrix += times_matrix(tl.trans(x).to(DOT), weighted, DOT, PRECISION)
    if DEGREE == 1:
        tl.store(norm_ptr + kk, vector * factor, mask=kk < P)
    else:
        off, is_there = matrix_offsets(kk[:, None], kk[None, :], K, TILE)
        is_first = kk[:, None] // TILE <= kk[None, :] // TILE
        tl.store(norm_ptr + off, matrix * factor, mask=is_there & is_first)


@triton.jit
def _power_fwd_state_kernel(
    x_ptr, y_ptr, inverse_ptr, delta_ptr, high_ptr, low_ptr, kv_ptr, norm_ptr, chunks_ptr,
    tiles_ptr, stride_xb, stride_xt, stride_xh, stride_yb, stride_yt, stride_yh, T, G, K, V, P,
    factor,
    NUM_BLOCKS: tl.constexpr, REPEAT: tl.constexpr, DEGREE: tl.constexpr, TILE: tl.constexpr,
    AT_ONCE: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_T: tl.constexpr,
    HAS_GATES: tl.constexpr, HAS_INVERSE: tl.constexpr, HAS_DELTA: tl.constexpr,
    HAS_NORM: tl.constexpr, TO_END: tl.constexpr, NEEDS_ALL: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    # Blocks of features vary fastest, because they read the same tokens from cache.
    block = tl.program_id(0) % NUM_BLOCKS
    chunk = (tl.program_id(0) // NUM_BLOCKS).to(tl.int64)
    g = tl.program_id(2).to(tl.int64)
    _, batch, start, end, sequence_start, sequence_end = load_chunk(chunks_ptr, chunk)
    if _is_unread(start, end, sequence_start, sequence_end, TO_END, NEEDS_ALL):
        return
    length = (end - start).to(tl.int32)
    t = tl.arange(0, BLOCK_T)
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    gate_off = (batch * G + g) * T + start
    kv = tl.zeros((BLOCK_F, BLOCK_V), tl.float32)
    norm = tl.zeros((BLOCK_F,), tl.float32)
    for repeat in range(REPEAT):
        head = g * REPEAT + repeat
        row_off = (batch * T + start) * (G * REPEAT) + head
        for first in range(0, length, BLOCK_T):
            token = start + first
            mask = t < length - first
            x_off = batch * stride_xb + token * stride_xt + head * stride_xh
            phi = features(
                x_ptr + x_off, t * stride_xt, mask, tiles_ptr, block, K,
                DEGREE, TILE, AT_ONCE, True, False, DOT,
            )  # fmt: skip
            y_off = batch * stride_yb + token * stride_yt + head * stride_yh
            y = tl.load(
                y_ptr + y_off + t[:, None] * stride_yt + v[None, :],
                mask=mask[:, None] & (v < V)[None, :],
                other=0.0,
            )
            weight = _weight(
                high_ptr, low_ptr, inverse_ptr, gate_off, row_off, first + t, length, G * REPEAT,
                HAS_GATES, HAS_INVERSE, TO_END,
            )  # fmt: skip
            if HAS_GATES or HAS_INVERSE:
                y = y * weight[:, None]
            kv = tl.dot(phi.to(DOT), y.to(DOT), kv, input_precision=PRECISION)
            if HAS_NORM:
                if HAS_DELTA:
                    weight *= -tl.load(
                        delta_ptr + row_off + (first + t) * (G * REPEAT), mask=mask, other=0.0
                    )
                norm += sum_of_products(phi.to(tl.float32), weight[None, :], 1)
    f = block * BLOCK_F + tl.arange(0, BLOCK_F)
    out_off = (chunk * G + g) * P
    tl.store(
        kv_ptr + (out_off + f)[:, None] * V + v[None, :],
        kv * factor,
        mask=(f < P)[:, None] & (v < V)[None, :],
    )
    if HAS_NORM and tl.program_id(1) == 0:
        tl.store(norm_ptr + out_off + f, norm * factor, mask=f < P)


def scan(
    parts: Tensor,
    read_dtype: torch.dtype,
    initial: Tensor | None,
    final: Tensor | None,
    gates: Gates | None,
    chunks: Chunks,
    tiles: Tiles,
    T: int,
    degree: int,
    *,
    is_reverse: bool,
    other: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The decayed sum of `parts` before each chunk or, in reverse, after each chunk.

    Args:
        parts: (chunks, G, P, V) or (chunks, G, P) float32; overwritten by a float32 result.
        read_dtype: dtype of the result. The running sum itself stays in float32 registers.
        initial: (S, …) initial state of every sequence; in reverse the gradient of its final state.
        final: (S, …) filled with the sum at the end of every sequence.
        other: in reverse, the states before each chunk. Then the second result is the product of
            sum and state at the end of each chunk, (chunks, G) float64, for eq. (19).
    """
    G, P = parts.shape[1:3]
    V = parts.shape[3] if parts.ndim == 4 else 1
    read = parts if read_dtype == torch.float32 else torch.empty_like(parts, dtype=read_dtype)
    block_v = triton.next_power_of_2(V)
    block_p = max(1, min(triton.next_power_of_2(P), 2048 // block_v))
    row_blocks = triton.cdiv(P, block_p)
    products = None
    if other is not None:
        products = parts.new_empty(chunks.num, G, row_blocks)
    _power_fwd_scan_kernel[(chunks.sequences.shape[0] * row_blocks, G)](
        parts,
        read,
        parts if initial is None else initial,
        parts if final is None else final,
        parts if other is None else other,
        parts if products is None else products,
        parts if gates is None else gates.high,
        parts if gates is None else gates.low,
        chunks.table,
        chunks.sequences,
        tiles.table,
        T,
        G,
        P,
        V,
        row_blocks,
        DEGREE=degree,
        TILE_FEATURES=tiles.tile**degree,
        BLOCK_P=block_p,
        BLOCK_V=block_v,
        HAS_GATES=gates is not None,
        HAS_INITIAL=initial is not None,
        HAS_FINAL=final is not None,
        HAS_OTHER=other is not None,
        IS_REVERSE=is_reverse,
        # With fewer values than threads, one warp could overwrite what another has yet to load.
        num_warps=4 if block_p * block_v >= 128 else 1,
    )
    return read, None if products is None else products.sum(dim=2, dtype=torch.float64)


@triton.jit
def _power_fwd_scan_kernel(
    parts_ptr, read_ptr, initial_ptr, final_ptr, other_ptr, products_ptr, high_ptr, low_ptr,
    chunks_ptr, sequences_ptr, tiles_ptr, T, G, P, V, row_blocks,
    DEGREE: tl.constexpr, TILE_FEATURES: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_V: tl.constexpr,
    HAS_GATES: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr,
    HAS_OTHER: tl.constexpr, IS_REVERSE: tl.constexpr,
):  # fmt: skip
    row_block = tl.program_id(0) % row_blocks
    sequence = (tl.program_id(0) // row_blocks).to(tl.int64)
    g = tl.program_id(1).to(tl.int64)
    first = tl.load(sequences_ptr + sequence * 2)
    count = tl.load(sequences_ptr + sequence * 2 + 1).to(tl.int32)
    row = row_block * BLOCK_P + tl.arange(0, BLOCK_P)
    v = tl.arange(0, BLOCK_V)
    mask = (row < P)[:, None] & (v < V)[None, :]
    off = row.to(tl.int64)[:, None] * V + v[None, :]
    state_size = P * V
    multiplicity = tl.full((BLOCK_P,), 1.0, tl.float32)
    if DEGREE > 1 and IS_REVERSE:
        # Like states, gradients are carried without the multiplicity.
        tile = row // TILE_FEATURES
        multiplicity = tl.load(tiles_ptr + tile * (DEGREE + 1) + DEGREE, mask=row < P, other=1).to(
            tl.float32
        )
    running = tl.zeros((BLOCK_P, BLOCK_V), tl.float32)
    if HAS_INITIAL:
        initial = tl.load(initial_ptr + (sequence * G + g) * state_size + off, mask=mask, other=0.0)
        running = initial.to(tl.float32) / multiplicity[:, None]
    for step in range(count):
        chunk = first + (count - 1 - step if IS_REVERSE else step)
        chunk_off = (chunk * G + g) * state_size
        if HAS_OTHER:
            # The state at the end of a chunk is the state before the next one.
            is_inner = step > 0
            state = tl.load(
                other_ptr + chunk_off + G * state_size + off,
                mask=mask & is_inner,
                other=0.0,
            )
            product = tl.sum(running * multiplicity[:, None] * state.to(tl.float32))
            tl.store(products_ptr + (chunk * G + g) * row_blocks + row_block, product)
        # Without a final state nothing has computed the last part.
        is_read = HAS_FINAL | (step + 1 < count)
        part = tl.load(parts_ptr + chunk_off + off, mask=mask & is_read, other=0.0)
        tl.store(read_ptr + chunk_off + off, running.to(read_ptr.dtype.element_ty), mask=mask)
        if HAS_GATES:
            _, batch, _, end, _, _ = load_chunk(chunks_ptr, chunk)
            last_off = (batch * G + g) * T + end - 1
            decay = exp2_flushed(tl.load(high_ptr + last_off) + tl.load(low_ptr + last_off))
            running *= decay
        running += part
    if HAS_FINAL:
        final_off = (sequence * G + g) * state_size + off
        tl.store(final_ptr + final_off, running * multiplicity[:, None], mask=mask)
