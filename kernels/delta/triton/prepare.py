"""What tokens of a chunk make of it without its state: (3) to (6), and the factors of (8), (9)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from longhaul.kernels.common.triton.chunking import Chunks, load_chunk
from longhaul.kernels.common.triton.launch import candidates, config, launch
from longhaul.kernels.common.triton.rows import load_rows
from longhaul.kernels.delta.triton.decays import (
    decay_between,
    from_start,
    halves_at,
    inverse_of_unit_lower,
    load_gates,
    over_chunk,
    pairs_of_halves,
    to_end,
)
from longhaul.kernels.delta.triton.shapes import Shapes

_CANDIDATES = candidates(config(4, 1), config(8, 1))


class Prepared(NamedTuple):
    """Of every token and head of values, in the dtype of products; of T and decays in float32."""

    p: Tensor | None  # (B, T, H, BLOCK_C), scores of its query
    q_start: Tensor | None  # (B, T, H, K)
    k_end: Tensor  # (B, T, H, K)
    total: Tensor  # (chunks, H, K or 1), the decay over a chunk
    u: Tensor | None  # (B, T, H, V)
    w: Tensor | None  # (B, T, H, K)
    # For the backward pass, of (5):
    inverse: Tensor | None  # (B, T, H, BLOCK_C), T
    scores: Tensor | None  # (B, T, H, BLOCK_C), <k, k>


def prepare(
    shapes: Shapes, chunks: Chunks, q: Tensor | None, k: Tensor, v: Tensor, beta: Tensor | None,
    log_g: Tensor, scale: float, *, goes_back: bool,
) -> Prepared:  # fmt: skip
    """Everything that the call has."""
    B, T, H, V = v.shape
    K, C = shapes.K, shapes.meta["BLOCK_C"]
    erases, reads = beta is not None, q is not None

    def scratch(width: int, is_there: bool = True) -> Tensor | None:
        return shapes.scratch(k, B, T, H, width) if is_there else None

    k_end = shapes.scratch(k, B, T, H, K)
    total = k.new_empty(chunks.num, H, K if shapes.meta["CHANNELS"] else 1, dtype=torch.float32)
    inverse = None
    if erases and goes_back:
        inverse = k.new_empty(B, T, H, C, dtype=torch.float32)
    prepared = Prepared(
        scratch(C, reads), scratch(K, reads), k_end, total, scratch(V, erases),
        scratch(K, erases), inverse, scratch(C, erases and goes_back),
    )  # fmt: skip
    launch(
        _delta_prepare_kernel, lambda _: (chunks.num, H), _CANDIDATES,
        *(k if x is None else x for x in (q, k, v, beta, log_g, *prepared)),
        chunks.table, T, H, shapes.G, K, V, scale,
        HAS_QUERIES=reads, ERASES=erases, GOES_BACK=goes_back,
        **shapes.meta,
    )  # fmt: skip
    return prepared


@triton.jit
def _delta_prepare_kernel(
    q_ptr, k_ptr, v_ptr, beta_ptr, g_ptr, p_ptr, q_start_ptr, k_end_ptr, total_ptr, u_ptr, w_ptr,
    inverse_ptr, scores_ptr, table_ptr, T, H, G, K, V, scale,
    HAS_QUERIES: tl.constexpr, ERASES: tl.constexpr, GOES_BACK: tl.constexpr,
    CHANNELS: tl.constexpr, LEVELS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    chunk, h = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    _, batch, start, end, _, _ = load_chunk(table_ptr, chunk)
    if start >= end:
        return
    c = tl.arange(0, BLOCK_C)
    t, i = c[:, None], c[None, :]
    is_token = c < end - start
    row = (batch * T + start) * H + h  # of the first token, among those of all heads of values
    key = ((batch * T + start) * G + h // (H // G)) * K
    g_ptr += (batch * T * H + h) * (K if CHANNELS else 1)
    if not CHANNELS:
        g = load_gates(g_ptr, start, end, H, c, c, K, CHANNELS)
        tl.store(total_ptr + chunk * H + h, over_chunk(g))
    p = tl.zeros((BLOCK_C, BLOCK_C), tl.float32)
    scores = tl.zeros((BLOCK_C, BLOCK_C), tl.float32)
    for first in range(0, K, BLOCK_K):
        kk = first + tl.arange(0, BLOCK_K)
        if CHANNELS:
            g = load_gates(g_ptr, start, end, H * K, c, kk, K, CHANNELS)
            tl.store(total_ptr + (chunk * H + h) * K + kk, over_chunk(g), mask=kk < K)
        k = load_rows(k_ptr + key, c, is_token, G * K, kk, K).to(DOT)
        own = row * K + t * (H * K) + kk[None, :]
        is_number = is_token[:, None] & (kk < K)[None, :]
        k_end = k * to_end(g, c, CHANNELS, EXACT)
        tl.store(k_end_ptr + own, k_end.to(k_end_ptr.dtype.element_ty), mask=is_number)
        if HAS_QUERIES:
            q = load_rows(q_ptr + key, c, is_token, G * K, kk, K).to(DOT)
            q_start = scale * q * from_start(g, c, CHANNELS, EXACT)
            tl.store(q_start_ptr + own, q_start.to(q_start_ptr.dtype.element_ty), mask=is_number)
        if CHANNELS:
            if HAS_QUERIES:
                products = tl.sum(q.to(tl.float32) * k.to(tl.float32), axis=1)
                p += tl.where(t == i, products[:, None], 0.0)
            for level in range(0, LEVELS):
                later, earlier = halves_at(g, c, level, EXACT)
                columns = tl.trans((k * earlier).to(DOT))
                meets = pairs_of_halves(c, level)
                if HAS_QUERIES:
                    found = tl.dot((q * later).to(DOT), columns, input_precision=PRECISION)
                    p += tl.where(meets, found, 0.0)
                if ERASES:
                    found = tl.dot((k * later).to(DOT), columns, input_precision=PRECISION)
                    scores += tl.where(meets, found, 0.0)
        else:
            if HAS_QUERIES:
                p += tl.dot(q, tl.trans(k), input_precision=PRECISION)
            if ERASES:
                scores += tl.dot(k, tl.trans(k), input_precision=PRECISION)
    if not CHANNELS:
        between = decay_between(g, c)
        p *= between
        scores *= between
    pairs_at = row * BLOCK_C + t * (H * BLOCK_C) + i
    if HAS_QUERIES:
        p = (scale * p).to(p_ptr.dtype.element_ty)
        tl.store(p_ptr + pairs_at, p, mask=is_token[:, None])
    if ERASES:
        beta = tl.load(beta_ptr + row + c * H, mask=is_token, other=0.0).to(tl.float32)[:, None]
        scores = tl.where(t > i, scores, 0.0)
        inverse = inverse_of_unit_lower(beta * scores, c, LEVELS, EXACT)
        if GOES_BACK:
            tl.store(inverse_ptr + pairs_at, inverse, mask=is_token[:, None])
            scores = scores.to(scores_ptr.dtype.element_ty)
            tl.store(scores_ptr + pairs_at, scores, mask=is_token[:, None])
        # Not BLOCK_K: ptxas 12.8 assembles wrong code for Hopper from blocks of 32.
        for first in range(0, K, BLOCK):
            kk = first + tl.arange(0, BLOCK)
            if CHANNELS:
                g = load_gates(g_ptr, start, end, H * K, c, kk, K, CHANNELS)
            k = load_rows(k_ptr + key, c, is_token, G * K, kk, K).to(tl.float32)
            k_start = beta * k * from_start(g, c, CHANNELS, EXACT)
            w = tl.dot(inverse, k_start, input_precision=EXACT).to(w_ptr.dtype.element_ty)
            own = row * K + t * (H * K) + kk[None, :]
            tl.store(w_ptr + own, w, mask=is_token[:, None] & (kk < K)[None, :])
        for first in range(0, V, BLOCK):
            vv = first + tl.arange(0, BLOCK)
            v = load_rows(v_ptr + row * V, c, is_token, H * V, vv, V).to(tl.float32)
            u = tl.dot(inverse, beta * v, input_precision=EXACT).to(u_ptr.dtype.element_ty)
            at = row * V + t * (H * V) + vv[None, :]
            tl.store(u_ptr + at, u, mask=is_token[:, None] & (vv < V)[None, :])
