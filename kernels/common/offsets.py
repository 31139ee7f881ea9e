"""Checks of the offsets of packed documents; every error names the argument."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor


def check_packing(cu_seqlens: Tensor, q: Tensor) -> None:
    """Checks of packed documents that do not need the values of the offsets."""
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        is_tensor = isinstance(cu_seqlens, Tensor)
        found = cu_seqlens.dtype if is_tensor else type(cu_seqlens).__name__
        raise ValueError(f"cu_seqlens: found {found}, wanted a tensor of int32 or int64")
    if cu_seqlens.ndim != 1:
        raise ValueError(f"cu_seqlens: found {cu_seqlens.ndim} dimensions, wanted 1")
    if q.shape[0] != 1:
        raise ValueError(
            f"cu_seqlens: found B = {q.shape[0]}, wanted 1: documents are packed along T"
        )
    if cu_seqlens.device != q.device:
        raise ValueError(
            f"cu_seqlens: found device {cu_seqlens.device}, wanted {q.device} to match q"
        )


def has_values(cu_seqlens: Tensor) -> bool:
    """Whether the offsets are numbers: they are none on `meta` and while a graph is traced."""
    is_traced = torch.compiler.is_compiling() or type(cu_seqlens) is not Tensor
    return not (is_traced or cu_seqlens.is_meta)


def check_offsets(cu_seqlens: Tensor, T: int) -> tuple[int, ...]:
    """The offsets as numbers, copied from the device once per tensor rather than once per layer."""
    if cu_seqlens.is_inference():
        # Inference tensors have no version, so a later write would go unnoticed.
        return _read_offsets(cu_seqlens, T)
    return _cached_offsets(cu_seqlens, cu_seqlens._version, T)


@lru_cache(maxsize=8)
def _cached_offsets(cu_seqlens: Tensor, version: int, T: int) -> tuple[int, ...]:
    return _read_offsets(cu_seqlens, T)


def _read_offsets(cu_seqlens: Tensor, T: int) -> tuple[int, ...]:
    offsets: tuple[int, ...] = tuple(cu_seqlens.tolist())
    if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != T:
        raise ValueError(f"cu_seqlens: found {_short(offsets)}, wanted offsets from 0 to {T}")
    for n, (start, end) in enumerate(pairwise(offsets)):
        if end <= start:
            raise ValueError(
                f"cu_seqlens: found document {n} from {start} to {end}, wanted at least one token"
            )
    return offsets


def _short(offsets: tuple[int, ...]) -> str:
    return str(list(offsets)) if len(offsets) <= 8 else f"[{offsets[0]}, …, {offsets[-1]}]"
