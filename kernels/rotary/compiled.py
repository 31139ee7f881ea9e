"""Rotations in float32 on a CPU, in C++: the functions of triton.py."""

from __future__ import annotations

from ctypes import CDLL, Array, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longhaul.kernels import native

_Strides, _Sizes = c_int64 * 3, c_int64 * 4


@cache
def _functions() -> CDLL | None:
    functions = native.load(Path(__file__).with_name("rotary.cpp"))
    if functions is not None:
        x: list[Any] = [c_void_p, _Strides]
        phases: list[Any] = [c_void_p, c_void_p, _Strides]
        functions.rotate.argtypes = [*x, *phases, c_void_p, _Sizes, c_int]
        functions.rotate_backward.argtypes = [*x, *x, *phases, *[c_void_p] * 3, _Sizes, c_int]
    return functions


def serves(x: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether the functions below take these tensors."""
    return x.ndim == cos.ndim == 4 and native.serves(x, cos, sin) and _functions() is not None


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (B, T, H, K) rotated by phases (B, T, H, J), of which any dimension may be shared."""
    x, cos, sin = _readable(x), cos.contiguous(), sin.contiguous()
    y = x.new_empty(x.shape)
    arguments = *_with_strides(x), cos.data_ptr(), *_with_strides(sin), y.data_ptr(), _sizes(x)
    _compiled().rotate(*arguments, torch.get_num_threads())
    return y


def gradients(dy: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, cos and sin."""
    B, T, _, K = x.shape
    dy, x, cos, sin = _readable(dy), _readable(x), cos.contiguous(), sin.contiguous()
    dx = x.new_empty(x.shape)
    dcos, dsin = x.new_empty(2, B, T, cos.shape[2], K // 2).unbind(0)
    arguments = *_with_strides(dy), *_with_strides(x), cos.data_ptr(), *_with_strides(sin)
    into = (a.data_ptr() for a in (dx, dcos, dsin))
    _compiled().rotate_backward(*arguments, *into, _sizes(x), torch.get_num_threads())
    return dx, dcos.sum_to_size(cos.shape), dsin.sum_to_size(sin.shape)


def _readable(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _with_strides(x: Tensor) -> tuple[int, Array[c_int64]]:
    """The address, and strides that are 0 where a size is shared."""
    strides = (0 if x.shape[i] == 1 else x.stride(i) for i in range(3))
    return x.data_ptr(), _Strides(*strides)


def _sizes(x: Tensor) -> Array[c_int64]:
    return _Sizes(*x.shape[:3], x.shape[3] // 2)


def _compiled() -> CDLL:
    functions = _functions()
    assert functions is not None
    return functions
