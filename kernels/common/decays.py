"""Decays from their logs, without numbers that slow down matrix products."""

from __future__ import annotations

import torch
from torch import Tensor


def log2_smallest(dtype: torch.dtype) -> float:
    """log2 of the smallest decay that is not flushed to 0."""
    return -160.0 if dtype == torch.float64 else -64.0


def exp2_flushed_(x: Tensor, root: int = 1) -> Tensor:
    """2^(x / root) in place, flushed to 0 where 2^x is far below the rounding of 1.

    Products with smaller decays would be denormal, which makes a matrix product ten times slower.
    exp2 is used because torch's vectorised exp is just as slow on −inf.
    """
    torch.threshold_(x, log2_smallest(x.dtype), -torch.inf)
    return (x if root == 1 else x.div_(root)).exp2_()
