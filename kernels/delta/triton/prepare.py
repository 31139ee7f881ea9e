"""What tokens of a chunk make of it without its state: scores of queries, U and W of (6)."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from longhaul.kernels.common.triton.chunking import Chunks, load_chunk
from longhaul.kernels.common.triton.rows import load_rows
from longhaul.kernels.delta.triton.decays import (
    decay_between,
    faded_scores,
    from_start,
    inverse_of_unit_lower,
    load_gates,
)
from longhaul.kernels.delta.triton.shapes import Shapes


class Prepared(NamedTuple):
    """Of every token and head of values, in the dtype of products."""

    p: Tensor | None  # (B, T, H, BLOCK_C): scores of its query, without the scale
    u: Tensor | None  # (B, T, H, V)
    w: Tensor | None  # (B, T, H, K)


def prepare(
    shapes: Shapes, chunks: Chunks, q: Tensor | None, k: Tensor, v: Tensor, beta: Tensor | None,
    log_g: Tensor,
) -> Prepared:  # fmt: skip
    """Scores, U and W of all chunks; those that the call has."""
    B, T, H, V = v.shape
    erases = beta is not None
    p = None if q is None else shapes.scratch(k, B, T, H, shapes.meta["BLOCK_C"])
    u = shapes.scratch(k, B, T, H, V) if erases else None
    w = shapes.scratch(k, B, T, H, shapes.K) if erases else None
    if p is not None or erases:
        _delta_prepare_kernel[(chunks.num, H)](
            k if q is None else q, k, v, log_g if beta is None else beta, log_g,
            *(k if x is None else x for x in (p, u, w)), chunks.table, T, H, shapes.G, shapes.K, V,
            HAS_QUERIES=q is not None, ERASES=erases, **shapes.meta,
        num_warps=8, num_stages=1,
        )  # fmt: skip
    return Prepared(p, u, w)


@triton.jit
def _delta_prepare_kernel(
    q_ptr, k_ptr, v_ptr, beta_ptr, g_ptr, p_ptr, u_ptr, w_ptr, table_ptr, T, H, G, K, V,
    HAS_QUERIES: tl.constexpr, ERASES: tl.constexpr, CHANNELS: tl.constexpr,
    LEVELS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    _, batch, start, end, _, _ = load_chunk(table_ptr, tl.program_id(0))
    if start >= end:
        return
    h = tl.program_id(1).to(tl.int64)
    c, kk = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_K)
    is_token = c < end - start
    row = (batch * T + start) * H + h  # of the first token, among those of all heads of values
    key = ((batch * T + start) * G + h // (H // G)) * K
    g_width = K if CHANNELS else 1
    gate_ptr = g_ptr + (batch * T * H + h) * g_width
    g, g_after = load_gates(gate_ptr, start, end, H * g_width, c, kk, K, CHANNELS, BLOCK_C)
    between = g
    if not CHANNELS:
        between = decay_between(g, c)
    k = load_rows(k_ptr + key, c, is_token, G * K, kk, K).to(DOT)
    if HAS_QUERIES:
        q = load_rows(q_ptr + key, c, is_token, G * K, kk, K).to(DOT)
        p = faded_scores(
            q, k, g, g_after, between, c, CHANNELS, LEVELS, BLOCK_C, BLOCK_K, DOT, PRECISION
        )
        at = p_ptr + row * BLOCK_C + c[:, None] * (H * BLOCK_C) + c[None, :]
        tl.store(at, p.to(p_ptr.dtype.element_ty), mask=is_token[:, None])
    if ERASES:
        beta = tl.load(beta_ptr + row + c * H, mask=is_token, other=0.0).to(tl.float32)[:, None]
        a = beta * faded_scores(
            k, k, g, g_after, between, c, CHANNELS, LEVELS, BLOCK_C, BLOCK_K, DOT, PRECISION
        )
        a = tl.where(c[:, None] > c[None, :], a, 0.0)
        inverse = inverse_of_unit_lower(a, c, LEVELS, EXACT)
        k_start = beta * k.to(tl.float32) * from_start(g, CHANNELS)
        w = tl.dot(inverse, k_start, input_precision=EXACT)
        at = w_ptr + row * K + c[:, None] * (H * K) + kk[None, :]
        tl.store(at, w.to(w_ptr.dtype.element_ty), mask=is_token[:, None] & (kk < K)[None, :])
        for first in range(0, V, BLOCK_V):
            vv = first + tl.arange(0, BLOCK_V)
            v = load_rows(v_ptr + row * V, c, is_token, H * V, vv, V).to(tl.float32)
            u = tl.dot(inverse, beta * v, input_precision=EXACT)
            at = u_ptr + row * V + c[:, None] * (H * V) + vv[None, :]
            tl.store(at, u.to(u_ptr.dtype.element_ty), mask=is_token[:, None] & (vv < V)[None, :])
