"""The output of every chunk, (9)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from longhaul.kernels.common.triton.chunking import Chunks, load_chunk
from longhaul.kernels.common.triton.rows import load_rows
from longhaul.kernels.delta.triton.decays import from_start, load_gates
from longhaul.kernels.delta.triton.shapes import Shapes, blocks_of_values


def read(
    shapes: Shapes, chunks: Chunks, q: Tensor, log_g: Tensor, p: Tensor, states: Tensor,
    new: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    """(B, T, H, V) in the dtype of q."""
    B, T, H, V = new.shape
    out = q.new_empty(B, T, H, V)
    _delta_read_kernel[(chunks.num, H, blocks_of_values(shapes, V))](
        q, log_g, p, states, new, out, chunks.table, T, H, shapes.G, shapes.K, V, scale,
        **shapes.meta,
    )  # fmt: skip
    return out


@triton.jit
def _delta_read_kernel(
    q_ptr, g_ptr, p_ptr, states_ptr, new_ptr, out_ptr, table_ptr, T, H, G, K, V, scale,
    CHANNELS: tl.constexpr, LEVELS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    chunk, h = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    _, batch, start, end, _, _ = load_chunk(table_ptr, chunk)
    if start >= end:
        return
    c, kk = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_K)
    vv = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_token = c < end - start
    row = (batch * T + start) * H + h
    key = ((batch * T + start) * G + h // (H // G)) * K
    g_width = K if CHANNELS else 1
    gate_ptr = g_ptr + (batch * T * H + h) * g_width
    g, _ = load_gates(gate_ptr, start, end, H * g_width, c, kk, K, CHANNELS, BLOCK_C)
    q = load_rows(q_ptr + key, c, is_token, G * K, kk, K)
    q_start = (q.to(tl.float32) * from_start(g, CHANNELS)).to(DOT)
    at = states_ptr + (chunk * H + h) * K * V + kk[:, None] * V + vv[None, :]
    state = tl.load(at, mask=(kk < K)[:, None] & (vv < V)[None, :], other=0.0).to(DOT)
    out = tl.dot(q_start, state, input_precision=PRECISION)
    p = load_rows(p_ptr + row * BLOCK_C, c, is_token, H * BLOCK_C, c, BLOCK_C).to(DOT)
    new = load_rows(new_ptr + row * V, c, is_token, H * V, vv, V).to(DOT)
    out += tl.dot(p, new, input_precision=PRECISION)
    at = out_ptr + row * V + c[:, None] * (H * V) + vv[None, :]
    out = (scale * out).to(out_ptr.dtype.element_ty)
    tl.store(at, out, mask=is_token[:, None] & (vv < V)[None, :])
