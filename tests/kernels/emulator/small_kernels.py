"""Kernels of a few lines, which the interpreter and the emulator both run."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from longhaul.kernels.common.triton.launch import candidates, config, launch


@triton.jit
def _numbers_kernel(x_ptr, i_ptr, float_ptr, int_ptr, T, BLOCK: tl.constexpr):
    t = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + t, mask=t < T, other=1.0)
    i = tl.load(i_ptr + t, mask=t < T, other=1)
    tl.store(float_ptr + t, tl.exp2(-x * x) + tl.sqrt(x * x + 1.0), mask=t < T)
    tl.store(float_ptr + T + t, tl.cumsum(i, 0).to(tl.float32) / 3.0, mask=t < T)
    tl.store(float_ptr + 2 * T + t, tl.where(x > 0.5, tl.max(x, 0), tl.abs(x)), mask=t < T)
    wide = i.to(tl.int64) * 1_000_003_000_000
    divided = (1_000_003 * i) // (i * i + 1) % 1000
    tl.store(int_ptr + t, wide + divided - (i >> 2) + (i << 3), mask=t < T)
    tl.store(int_ptr + T + t, (i ^ (i & 12)) | (tl.sum(i, 0) + (i.to(tl.int8) // 2)), mask=t < T)


def numbers() -> tuple[Tensor, Tensor]:
    """Arithmetic of floats and of integers: a row for each expression above."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(100, generator=generator)
    i = torch.randint(-60, 60, (100,), generator=generator, dtype=torch.int32)
    floats, integers = torch.zeros(3, 100), torch.zeros(2, 100, dtype=torch.int64)
    _numbers_kernel[(1,)](x, i, floats, integers, 100, BLOCK=128, num_warps=4)
    return floats, integers


@triton.jit
def _product_kernel(a_ptr, b_ptr, c_ptr, T, BLOCK: tl.constexpr, DOT: tl.constexpr):
    row, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for t in range(0, T, BLOCK):
        a = tl.load(a_ptr + row * T + t + column)
        # A change of values passes through registers: stores to shared memory, and not cp.async.
        b = 2 * tl.load(b_ptr + (t + row) * BLOCK + column)
        total = tl.dot(a.to(DOT), b.to(DOT), total, input_precision="ieee")
    tl.store(c_ptr + row * BLOCK + column, total)


def product(
    dtype: Any = torch.bfloat16, block: int = 64, num_blocks: int = 4
) -> tuple[Tensor, Tensor]:
    """2 a b, and what it should be."""
    T = num_blocks * block
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(block, T, generator=generator).to(dtype)
    b = torch.randn(T, block, generator=generator).to(dtype)
    c = torch.zeros(block, block)
    dot = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}[dtype]
    _product_kernel[(1,)](a, b, c, T, BLOCK=block, DOT=dot, num_warps=4, num_stages=2)
    return c, 2 * a.double() @ b.double()


@triton.jit
def _double_kernel(x_ptr, y_ptr, T, BLOCK: tl.constexpr):
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + t, 2 * tl.load(x_ptr + t, mask=t < T, other=0.0), mask=t < T)


def double(step: int = 64) -> tuple[Tensor, Tensor]:
    """2 x, and what it should be. Programs are 64 numbers apart if step is 64."""
    x = torch.randn(100, generator=torch.Generator().manual_seed(0))
    y = torch.zeros(100)
    _double_kernel[(100 // step + 1,)](x, y, 100, BLOCK=64, num_warps=1)
    return y, 2 * x.double()


@triton.jit
def _sum_kernel(x_ptr, y_ptr, T, BLOCK: tl.constexpr):
    t = tl.arange(0, BLOCK)
    tl.store(y_ptr, tl.sum(tl.load(x_ptr + t, mask=t < T, other=0.0), 0))


def total() -> tuple[Tensor, Tensor]:
    """A sum over one block, and what it should be: wrong with the second candidate's block."""
    x = torch.randn(100, generator=torch.Generator().manual_seed(0))
    y = torch.zeros(1)
    both = candidates(config(4, 1, BLOCK=128), config(4, 1, BLOCK=64))
    launch(_sum_kernel, lambda meta: (1,), both, x, y, 100)
    return y, x.double().sum()[None]


@triton.jit
def _shared_store_kernel(x_ptr, y_ptr, T):
    tl.store(y_ptr, tl.load(x_ptr + tl.program_id(0)))


def two_programs() -> tuple[Tensor, Tensor]:
    """Two programs store to one place."""
    x, y = torch.randn(2), torch.zeros(1)
    _shared_store_kernel[(2,)](x, y, 2)
    return y, y.double()


@triton.jit
def _reversing_kernel(x_ptr, BLOCK: tl.constexpr, IS_SAFE: tl.constexpr):
    t = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + t)
    if IS_SAFE:
        tl.debug_barrier()
    tl.store(x_ptr + BLOCK - 1 - t, x)


def reversing(is_safe: bool) -> tuple[Tensor, Tensor]:
    """A tensor reversed in place: each warp stores where another loads."""
    x = torch.randn(128, generator=torch.Generator().manual_seed(0))
    wanted = x.double().flip(0)
    _reversing_kernel[(1,)](x, BLOCK=128, IS_SAFE=is_safe, num_warps=4)
    return x, wanted
