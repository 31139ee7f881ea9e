"""Programs that rotate a block of tokens, one head after the other."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK_T = 32


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (B, T, H, K) or (B, H, T, K), rotated by phases that have one head or all heads."""
    y = x.new_empty(x.shape)
    _launch(_rotate_kernel, (x, y), (cos, sin))
    return y


def gradients(dy: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, cos and sin."""
    dx = x.new_empty(x.shape)
    # A row of phases for each batch row, although they may share one.
    shape = [max(sizes) for sizes in zip(cos.shape[:1], x.shape[:1], strict=True)]
    dcos, dsin = (cos.new_empty(*shape, *cos.shape[1:]) for _ in range(2))
    _launch(_rotate_backward_kernel, (dy, x, dx), (cos, sin, dcos, dsin))
    return dx, dcos.sum_to_size(cos.shape), dsin.sum_to_size(sin.shape)


def _launch(kernel: Any, rows: tuple[Tensor, ...], phases: tuple[Tensor, ...]) -> None:
    """Run a kernel for each block of tokens, with strides of 0 where phases are shared."""
    rows = tuple(x if x.stride(-1) == 1 else x.contiguous() for x in rows)
    phases = tuple(x if x.stride(-1) == 1 else x.contiguous() for x in phases)
    if phases[0].shape[1] == 1 < rows[0].shape[1]:
        # Heads come before tokens.
        rows = tuple(x.transpose(1, 2) for x in rows)
        phases = tuple(x.transpose(1, 2) for x in phases)
    B, T, H, K = rows[0].shape
    strides: list[int] = []
    for x in (*rows, *phases):
        strides += [0 if size == 1 else x.stride(i) for i, size in enumerate(x.shape[:3])]
    with torch.cuda.device_of(rows[0]):  # Triton launches on the current device
        kernel[(triton.cdiv(T, _BLOCK_T), B)](
            *rows,
            *phases,
            *strides,
            T,
            H,
            K // 2,
            IS_SHARED=phases[0].shape[2] == 1,
            BLOCK_T=_BLOCK_T,
            BLOCK_J=triton.next_power_of_2(K // 2),
            num_warps=4,
        )


@triton.jit
def _rotate_kernel(
    x_ptr, y_ptr, cos_ptr, sin_ptr,
    stride_xb, stride_xt, stride_xh, stride_yb, stride_yt, stride_yh,
    stride_cb, stride_ct, stride_ch, stride_sb, stride_st, stride_sh, T, H, J,
    IS_SHARED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1).to(tl.int64)
    t = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
    j = tl.arange(0, BLOCK_J)[None, :]
    mask = (t < T) & (j < J)
    x_ptr += b * stride_xb + t * stride_xt + j
    y_ptr += b * stride_yb + t * stride_yt + j
    cos_ptr += b * stride_cb + t * stride_ct + j
    sin_ptr += b * stride_sb + t * stride_st + j
    for head in range(H):
        h = tl.cast(head, tl.int64)
        cos = tl.load(cos_ptr + h * stride_ch, mask=mask, other=0.0)
        sin = tl.load(sin_ptr + h * stride_sh, mask=mask, other=0.0)
        first = tl.load(x_ptr + h * stride_xh, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(x_ptr + h * stride_xh + J, mask=mask, other=0.0).to(tl.float32)
        dtype = y_ptr.dtype.element_ty
        one, two = first * cos - second * sin, first * sin + second * cos
        tl.store(y_ptr + h * stride_yh, one.to(dtype), mask=mask)
        tl.store(y_ptr + h * stride_yh + J, two.to(dtype), mask=mask)


@triton.jit
def _rotate_backward_kernel(
    dy_ptr, x_ptr, dx_ptr, cos_ptr, sin_ptr, dcos_ptr, dsin_ptr,
    stride_yb, stride_yt, stride_yh, stride_xb, stride_xt, stride_xh,
    stride_db, stride_dt, stride_dh, stride_cb, stride_ct, stride_ch,
    stride_sb, stride_st, stride_sh, stride_dcb, stride_dct, stride_dch,
    stride_dsb, stride_dst, stride_dsh, T, H, J,
    IS_SHARED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1).to(tl.int64)
    t = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
    j = tl.arange(0, BLOCK_J)[None, :]
    mask = (t < T) & (j < J)
    dy_ptr += b * stride_yb + t * stride_yt + j
    x_ptr += b * stride_xb + t * stride_xt + j
    dx_ptr += b * stride_db + t * stride_dt + j
    cos_ptr += b * stride_cb + t * stride_ct + j
    sin_ptr += b * stride_sb + t * stride_st + j
    dcos_ptr += b * stride_dcb + t * stride_dct + j
    dsin_ptr += b * stride_dsb + t * stride_dst + j
    dcos = tl.zeros((BLOCK_T, BLOCK_J), tl.float32)
    dsin = tl.zeros((BLOCK_T, BLOCK_J), tl.float32)
    for head in range(H):
        h = tl.cast(head, tl.int64)
        cos = tl.load(cos_ptr + h * stride_ch, mask=mask, other=0.0)
        sin = tl.load(sin_ptr + h * stride_sh, mask=mask, other=0.0)
        first = tl.load(x_ptr + h * stride_xh, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(x_ptr + h * stride_xh + J, mask=mask, other=0.0).to(tl.float32)
        one = tl.load(dy_ptr + h * stride_yh, mask=mask, other=0.0).to(tl.float32)
        two = tl.load(dy_ptr + h * stride_yh + J, mask=mask, other=0.0).to(tl.float32)
        dtype = dx_ptr.dtype.element_ty
        tl.store(dx_ptr + h * stride_dh, (one * cos + two * sin).to(dtype), mask=mask)
        tl.store(dx_ptr + h * stride_dh + J, (two * cos - one * sin).to(dtype), mask=mask)
        dcos += one * first + two * second
        dsin += two * first - one * second
        if not IS_SHARED:
            tl.store(dcos_ptr + h * stride_dch, dcos, mask=mask)
            tl.store(dsin_ptr + h * stride_dsh, dsin, mask=mask)
            dcos = tl.zeros((BLOCK_T, BLOCK_J), tl.float32)
            dsin = tl.zeros((BLOCK_T, BLOCK_J), tl.float32)
    if IS_SHARED:
        tl.store(dcos_ptr, dcos, mask=mask)
        tl.store(dsin_ptr, dsin, mask=mask)
