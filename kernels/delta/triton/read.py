"""The output of every chunk, (9)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from longhaul.kernels.common.triton.chunking import Chunks, load_chunk
from longhaul.kernels.common.triton.launch import candidates, config, launch
from longhaul.kernels.common.triton.rows import load_rows
from longhaul.kernels.delta.triton.shapes import Shapes

_CANDIDATES = candidates(config(4, 2), config(4, 3))


def read(
    shapes: Shapes, chunks: Chunks, q: Tensor, q_start: Tensor, p: Tensor, states: Tensor,
    new: Tensor,
) -> Tensor:  # fmt: skip
    """(B, T, H, V) in the dtype of q."""
    _, T, H, V = new.shape
    blocks = triton.cdiv(V, shapes.meta["BLOCK"])
    out = q.new_empty(new.shape)
    launch(
        _delta_read_kernel, lambda _: (chunks.num, H, blocks), _CANDIDATES,
        q_start, p, states, new, out, chunks.table, T, H, shapes.K, V, **shapes.meta,
    )  # fmt: skip
    return out


@triton.jit
def _delta_read_kernel(
    q_start_ptr, p_ptr, states_ptr, new_ptr, out_ptr, table_ptr, T, H, K, V,
    CHANNELS: tl.constexpr, LEVELS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    chunk, h = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    _, batch, start, end, _, _ = load_chunk(table_ptr, chunk)
    if start >= end:
        return
    c = tl.arange(0, BLOCK_C)
    vv = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    is_token = c < end - start
    row = (batch * T + start) * H + h
    p = load_rows(p_ptr + row * BLOCK_C, c, is_token, H * BLOCK_C, c, BLOCK_C)
    new = load_rows(new_ptr + row * V, c, is_token, H * V, vv, V).to(DOT)
    out = tl.dot(p, new, input_precision=PRECISION)
    for first in range(0, K, BLOCK):
        kk = first + tl.arange(0, BLOCK)
        q_start = load_rows(q_start_ptr + row * K, c, is_token, H * K, kk, K)
        state = load_rows(states_ptr + (chunk * H + h) * K * V, kk, kk < K, V, vv, V)
        out += tl.dot(q_start, state, input_precision=PRECISION)
    at = out_ptr + row * V + c[:, None] * (H * V) + vv[None, :]
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=is_token[:, None] & (vv < V)[None, :])
