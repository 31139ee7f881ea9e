"""The sums that each chunk adds to a state, eq. (9), or to a gradient of a state, eq. (13)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from longhaul.kernels.common.triton.chunking import Chunks, Gates, exp2_flushed, load_chunk
from longhaul.kernels.common.triton.launch import Operands, block_of, launch, strides
from longhaul.kernels.common.triton.rows import load_rows, sum_of_products
from longhaul.kernels.power.triton.features import (
    Tiles,
    features,
    matrix_offsets,
    times_matrix,
)
from longhaul.kernels.power.triton.tile_sizes import SUMS


class Tokens(NamedTuple):
    """The terms of a chunk's sums: Σ_t decay_t φ(x_t) [y_weight_t y_t, norm_weight_t]."""

    x: Tensor  # (B, T, heads, K), heads = G or H
    y: Tensor  # (B, T, heads, V)
    inverse: Tensor | None  # (B, T, H): weight of y; None means 1
    delta: Tensor | None  # (B, T, H): −delta · inverse is the weight of the norm; None means 1


class Sums(NamedTuple):
    """How tokens are added up, times `factor`, for G key heads.

    Forward in time every token decays to the end of its chunk, eq. (9), and the weight of the norm
    is 1. In reverse the decay is from the start of the chunk to the token, eq. (13), and the
    weights include inverse and −delta.
    """

    tokens: Tokens
    gates: Gates | None
    chunks: Chunks
    tiles: Tiles
    operands: Operands
    G: int
    degree: int
    factor: float
    is_reverse: bool

    @property
    def block_f(self) -> int:
        """Features that a program sums at a time."""
        return self.tiles.at_once * int(self.tiles.tile**self.degree)

    @property
    def block_v(self) -> int:
        """Values that a program sums at a time."""
        return min(block_of(self.tokens.y.shape[3]), 128)

    @property
    def v_blocks(self) -> int:
        return int(triton.cdiv(self.tokens.y.shape[3], self.block_v))

    @property
    def is_narrow(self) -> bool:
        """Whether a program's sums leave room for larger blocks of tokens.

        At degree 4 the products of four coordinates take that room.
        """
        return self.degree < 4 and self.block_v <= 64

    def arguments(self, unused: Tensor) -> tuple[Tensor, ...]:
        """What kernels read of the tokens; `unused` stands for what is absent."""
        x, y, inverse, delta = self.tokens
        gates = self.gates
        return (
            x,
            y,
            unused if inverse is None else inverse,
            unused if delta is None else delta,
            unused if gates is None else gates.high,
            unused if gates is None else gates.low,
        )

    def sizes(self) -> tuple[int | float, ...]:
        """Strides of x and y, then T, G, K, V, P and the factor."""
        x, y = self.tokens.x, self.tokens.y
        T, K, V = x.shape[1], x.shape[3], y.shape[3]
        return (*strides(x, y), T, self.G, K, V, self.tiles.P, self.factor)

    def constants(self) -> dict[str, Any]:
        """What kernels are compiled for."""
        return {
            "REPEAT": self.tokens.x.shape[2] // self.G,
            "DEGREE": self.degree,
            "TILE": self.tiles.tile,
            "HAS_GATES": self.gates is not None,
            "HAS_INVERSE": self.tokens.inverse is not None,
            "HAS_DELTA": self.tokens.delta is not None,
            "IS_REVERSE": self.is_reverse,
            "DOT": self.operands.dtype,
            "PRECISION": self.operands.precision,
        }


def chunk_sums(sums: Sums, *, has_norm: bool, needs_all: bool) -> tuple[Tensor, Tensor]:
    """Sums (chunks, G, P, V) and, if `has_norm`, (chunks, G, P), else an empty tensor; float32.

    Without `needs_all` those of each sequence's last chunk, in reverse of its first, are left
    uninitialised: only the state after the sequence, or before it, would include them.
    """
    x, V = sums.tokens.x, sums.tokens.y.shape[3]
    chunks, tiles, G = sums.chunks, sums.tiles, sums.G
    kv = x.new_empty(chunks.num, G, tiles.P, V, dtype=torch.float32)
    norm = x.new_empty((chunks.num, G, tiles.P) if has_norm else (0,), dtype=torch.float32)
    launch(
        _power_fwd_state_kernel,
        lambda _: (chunks.num * tiles.num_blocks, sums.v_blocks, G),
        SUMS.of(x.dtype, is_narrow=sums.is_narrow), *sums.arguments(kv), kv, norm, chunks.table,
        tiles.table, *sums.sizes(),
        NUM_BLOCKS=tiles.num_blocks,
        AT_ONCE=tiles.at_once,
        BLOCK_F=sums.block_f,
        BLOCK_V=sums.block_v,
        HAS_NORM=has_norm,
        NEEDS_ALL=needs_all,
        **sums.constants(),
    )  # fmt: skip
    return kv, norm


def norm_sums(sums: Sums, *, needs_all: bool) -> Tensor:
    """The sums of the norm at degree 1 and 2, where it is a vector or a symmetric matrix.

    As those of `chunk_sums`, but of the matrix one half alone is written.
    """
    x, inverse, delta = sums.tokens.x, sums.tokens.inverse, sums.tokens.delta
    T, K = x.shape[1], x.shape[3]
    chunks, tiles, G, gates = sums.chunks, sums.tiles, sums.G, sums.gates
    norm = x.new_empty(chunks.num, G, tiles.P, dtype=torch.float32)
    _power_fwd_norm_kernel[(chunks.num, G)](
        x, norm if inverse is None else inverse, norm if delta is None else delta,
        norm if gates is None else gates.high, norm if gates is None else gates.low, norm,
        chunks.table, *strides(x), T, G, K, tiles.P, sums.factor,
        BLOCK_T=64 if K <= 64 else 32,
        BLOCK_K=block_of(K),
        NEEDS_ALL=needs_all,
        num_warps=4 if K <= 64 else 8,
        **sums.constants(),
    )  # fmt: skip
    return norm


@triton.jit
def _weight(
    high_ptr, low_ptr, inverse_ptr, gate_off, row_off, token, length, stride_row,
    HAS_GATES: tl.constexpr, HAS_INVERSE: tl.constexpr, IS_REVERSE: tl.constexpr,
):  # fmt: skip
    """The weight of each token of a chunk, 0 beyond its end."""
    mask = token < length
    weight = tl.where(mask, 1.0, 0.0)
    if HAS_GATES:
        high = tl.load(high_ptr + gate_off + token, mask=mask, other=0.0)
        low = tl.load(low_ptr + gate_off + token, mask=mask, other=0.0)
        if not IS_REVERSE:
            last_off = gate_off + tl.maximum(length - 1, 0)
            high = tl.load(high_ptr + last_off) - high
            low = tl.load(low_ptr + last_off) - low
        weight *= exp2_flushed(high + low)
    if HAS_INVERSE:
        weight *= tl.load(inverse_ptr + row_off + token * stride_row, mask=mask, other=0.0)
    return weight


@triton.jit
def _is_unread(
    start, end, sequence_start, sequence_end, IS_REVERSE: tl.constexpr, NEEDS_ALL: tl.constexpr
):
    """Whether nothing reads the sum of a chunk, or the chunk is empty."""
    if NEEDS_ALL:
        return start >= end
    elif IS_REVERSE:  # noqa: RET505
        return (start >= end) | (start <= sequence_start)
    else:
        return end >= sequence_end


@triton.jit
def _power_fwd_norm_kernel(
    x_ptr, inverse_ptr, delta_ptr, high_ptr, low_ptr, norm_ptr, chunks_ptr,
    stride_xb, stride_xt, stride_xh, T, G, K, P, factor,
    REPEAT: tl.constexpr, DEGREE: tl.constexpr, TILE: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr, HAS_GATES: tl.constexpr, HAS_INVERSE: tl.constexpr,
    HAS_DELTA: tl.constexpr, IS_REVERSE: tl.constexpr, NEEDS_ALL: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    # Σ_t weight_t x_t at degree 1; at degree 2 one half of the symmetric Σ_t weight_t x_t x_tᵀ.
    chunk = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1).to(tl.int64)
    _, batch, start, end, sequence_start, sequence_end = load_chunk(chunks_ptr, chunk)
    if _is_unread(start, end, sequence_start, sequence_end, IS_REVERSE, NEEDS_ALL):
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
            x = load_rows(x_ptr + x_off, t, mask, stride_xt, kk, K)
            weight = _weight(
                high_ptr, low_ptr, inverse_ptr, gate_off, row_off, token, length, G * REPEAT,
                HAS_GATES, HAS_INVERSE, IS_REVERSE,
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
def sum_of_tokens(
    x_ptr, y_ptr, inverse_ptr, delta_ptr, high_ptr, low_ptr, tiles_ptr,
    stride_xb, stride_xt, stride_xh, stride_yb, stride_yt, stride_yh, T, G, K, V,
    batch, g, start, length, block, v,
    REPEAT: tl.constexpr, DEGREE: tl.constexpr, TILE: tl.constexpr, AT_ONCE: tl.constexpr,
    BLOCK_F: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_T: tl.constexpr,
    HAS_GATES: tl.constexpr, HAS_INVERSE: tl.constexpr, HAS_DELTA: tl.constexpr,
    HAS_NORM: tl.constexpr, IS_REVERSE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The sums of one block of features with the values v, and with the weights of the norm."""
    t = tl.arange(0, BLOCK_T)
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
            y = load_rows(y_ptr + y_off, t, mask, stride_yt, v, V)
            weight = _weight(
                high_ptr, low_ptr, inverse_ptr, gate_off, row_off, first + t, length, G * REPEAT,
                HAS_GATES, HAS_INVERSE, IS_REVERSE,
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
    return kv, norm


@triton.jit
def _power_fwd_state_kernel(
    x_ptr, y_ptr, inverse_ptr, delta_ptr, high_ptr, low_ptr, kv_ptr, norm_ptr, chunks_ptr,
    tiles_ptr, stride_xb, stride_xt, stride_xh, stride_yb, stride_yt, stride_yh, T, G, K, V, P,
    factor,
    NUM_BLOCKS: tl.constexpr, REPEAT: tl.constexpr, DEGREE: tl.constexpr, TILE: tl.constexpr,
    AT_ONCE: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_T: tl.constexpr,
    HAS_GATES: tl.constexpr, HAS_INVERSE: tl.constexpr, HAS_DELTA: tl.constexpr,
    HAS_NORM: tl.constexpr, IS_REVERSE: tl.constexpr, NEEDS_ALL: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    # Blocks of features vary fastest, because they read the same tokens from cache.
    block = tl.program_id(0) % NUM_BLOCKS
    chunk = (tl.program_id(0) // NUM_BLOCKS).to(tl.int64)
    g = tl.program_id(2).to(tl.int64)
    _, batch, start, end, sequence_start, sequence_end = load_chunk(chunks_ptr, chunk)
    if _is_unread(start, end, sequence_start, sequence_end, IS_REVERSE, NEEDS_ALL):
        return
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    kv, norm = sum_of_tokens(
        x_ptr, y_ptr, inverse_ptr, delta_ptr, high_ptr, low_ptr, tiles_ptr,
        stride_xb, stride_xt, stride_xh, stride_yb, stride_yt, stride_yh, T, G, K, V,
        batch, g, start, (end - start).to(tl.int32), block, v,
        REPEAT, DEGREE, TILE, AT_ONCE, BLOCK_F, BLOCK_V, BLOCK_T,
        HAS_GATES, HAS_INVERSE, HAS_DELTA, HAS_NORM, IS_REVERSE, DOT, PRECISION,
    )  # fmt: skip
    f = block * BLOCK_F + tl.arange(0, BLOCK_F)
    out_off = (chunk * G + g) * P
    tl.store(
        kv_ptr + (out_off + f)[:, None] * V + v[None, :],
        kv * factor,
        mask=(f < P)[:, None] & (v < V)[None, :],
    )
    if HAS_NORM and tl.program_id(1) == 0:
        tl.store(norm_ptr + out_off + f, norm * factor, mask=f < P)
