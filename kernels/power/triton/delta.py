"""The product of the output with its gradient, which every row of the backward pass needs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from longhaul.kernels.common.triton.launch import block_of, strides, with_dense_rows
from longhaul.kernels.common.triton.rows import sum_of_products

_BLOCK_ROWS = 32


def row_delta(dout: Tensor, out: Tensor, is_live: Tensor | None) -> Tensor | None:
    """delta_t = dout_t·out_t, (B, T, H) float32, to be subtracted from gradients of weights.

    It is 0 where the denominator was floored. None if the output is not normalised, which
    `is_live` = None says.
    """
    if is_live is None:
        return None
    B, T, H, V = out.shape
    dout, out = with_dense_rows(dout), with_dense_rows(out)
    delta = out.new_empty(B, T, H, dtype=torch.float32)
    _power_bwd_delta_kernel[(triton.cdiv(T * H, _BLOCK_ROWS), B)](
        dout, out, is_live, delta, T, H, *strides(dout, out),
        V=V,
        BLOCK_ROWS=_BLOCK_ROWS,
        BLOCK_V=block_of(V),
    )  # fmt: skip
    return delta


@triton.jit
def _power_bwd_delta_kernel(
    dout_ptr, out_ptr, is_live_ptr, delta_ptr, T, H,
    stride_dout_b, stride_dout_t, stride_dout_h, stride_out_b, stride_out_t, stride_out_h,
    V: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    t, h = row // H, row % H
    row_mask = t < T
    v = tl.arange(0, BLOCK_V)[None, :]
    mask = row_mask[:, None] & (v < V)
    dout_off = batch * stride_dout_b + t * stride_dout_t + h * stride_dout_h
    out_off = batch * stride_out_b + t * stride_out_t + h * stride_out_h
    dout = tl.load(dout_ptr + dout_off[:, None] + v, mask=mask, other=0.0).to(tl.float32)
    out = tl.load(out_ptr + out_off[:, None] + v, mask=mask, other=0.0).to(tl.float32)
    delta = sum_of_products(dout, out, 1)
    row += batch * T * H
    is_live = tl.load(is_live_ptr + row, mask=row_mask, other=0) != 0
    tl.store(delta_ptr + row, tl.where(is_live, delta, 0.0), mask=row_mask)
