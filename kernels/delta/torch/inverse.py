"""The inverse of unit lower triangular matrices."""

from __future__ import annotations

import torch
from torch import Tensor

# Tokens of the blocks that are inverted by substitution. Larger ones are merged from two, which
# takes matrix products alone.
_SUBSTITUTED = 16


def unit_lower_inverse(a: Tensor) -> Tensor:
    """(I + A)^(−1), (X, C, C), from the entries of a below its diagonal; the others are not read.

    Blocks of 16 tokens are merged by eq. (16).
    For unit keys and β in [0, 2] no entry of any of these inverses exceeds 2. A series of powers of
    A would add far larger numbers that cancel.
    """
    X, C, _ = a.shape
    size = min(C, _SUBSTITUTED)
    unit = torch.eye(size, dtype=a.dtype, device=a.device)
    if size == C:
        return _substituted(a, unit)
    inverse = torch.zeros_like(a)
    small = _substituted(_diagonal_blocks(a, size).reshape(-1, size, size), unit)
    _diagonal_blocks(inverse, size).copy_(small.view(X, -1, size, size))
    while size < C:
        done, left = _diagonal_blocks(inverse, 2 * size), _diagonal_blocks(a, 2 * size)
        first, second = done[:, :, :size, :size], done[:, :, size:, size:]
        merged = (second @ left[:, :, size:, :size]) @ first
        done[:, :, size:, :size] = merged.neg_()
        size *= 2
    return inverse


def _substituted(a: Tensor, unit: Tensor) -> Tensor:
    x: Tensor = torch.linalg.solve_triangular(a, unit.expand_as(a), upper=False, unitriangular=True)
    return x


def _diagonal_blocks(x: Tensor, size: int) -> Tensor:
    """(X, C, C) as (X, blocks, size, size), a view."""
    X, C, _ = x.shape
    blocks = x.view(X, C // size, size, C // size, size)
    return blocks.diagonal(dim1=1, dim2=3).movedim(-1, 1)
