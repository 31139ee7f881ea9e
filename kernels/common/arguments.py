"""Checks of arguments that several ops have; every error names the argument."""

from __future__ import annotations

from math import inf
from numbers import Integral, Real

import torch
from torch import Tensor

_LONGEST_CHUNK = 2**31 - 1  # compiled kernels count tokens in 32 bits
_INPUT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_chunk_size(chunk_size: int | None) -> None:
    # Where the compiler treats it as a symbol, it is no int.
    is_whole = isinstance(chunk_size, (Integral, torch.SymInt)) and not isinstance(chunk_size, bool)
    if chunk_size is not None and not (is_whole and 1 <= chunk_size <= _LONGEST_CHUNK):
        raise ValueError(
            f"chunk_size: found {chunk_size!r}, wanted a whole number from 1 to {_LONGEST_CHUNK}"
        )


def check_flags(**flags: bool) -> None:
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise ValueError(f"{name}: found {flag!r}, wanted True or False")


def check_scale(scale: float | None) -> None:
    is_number = isinstance(scale, (Real, torch.SymFloat)) and not isinstance(scale, bool)
    if scale is not None and not (is_number and abs(scale) < inf):
        raise ValueError(f"scale: found {scale!r}, wanted a finite number")


def check_layout(**tensors: Tensor) -> None:
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise ValueError(f"{name}: found {type(x).__name__}, wanted a tensor")
        if x.ndim != 4 or 0 in x.shape:
            raise ValueError(
                f"{name}: found shape {tuple(x.shape)}, wanted (B, T, heads, width), "
                "each at least 1"
            )
    wanted, names = next(iter(tensors.values())).dtype, list(tensors)
    for name, x in tensors.items():
        if x.dtype != wanted or x.dtype not in _INPUT_DTYPES:
            every = f"{', '.join(names[:-1])} and {names[-1]}"
            raise ValueError(
                f"{name}: found {x.dtype}, wanted one floating-point dtype for {every}"
            )
