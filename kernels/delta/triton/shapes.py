"""Sizes of a call's kernels, and memory for what they leave to each other."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from longhaul.kernels.common.triton.launch import block_of, chip, operands_of

# Columns of values of one program.
_BLOCK_V = 64


class Shapes(NamedTuple):
    """Of one call."""

    G: int
    K: int
    dtype: torch.dtype  # of the operands of products
    meta: dict[str, Any]  # constants of every kernel

    def scratch(self, like: Tensor, *shape: int) -> Tensor:
        """Memory for operands of products."""
        return like.new_empty(shape, dtype=self.dtype)


def shapes_of(k: Tensor, v: Tensor, log_g: Tensor, chunk_size: int) -> Shapes:
    """The sizes of a call with these tensors."""
    G, K = k.shape[2:]
    operands = operands_of(k)
    block_c = block_of(chunk_size)
    meta = {
        "CHANNELS": log_g.ndim == 4,
        "LEVELS": block_c.bit_length() - 1,
        "BLOCK_C": block_c,
        "BLOCK_K": block_of(K),
        "BLOCK_V": min(_BLOCK_V, block_of(v.shape[3])),
        "DOT": operands.dtype,
        "PRECISION": operands.precision,
        # Of the inverse and of what it multiplies, whose errors would add up.
        "EXACT": "tf32x3" if chip().startswith("sm_") else "ieee",
    }
    is_narrow = operands.dtype == tl.bfloat16
    return Shapes(G, K, torch.bfloat16 if is_narrow else torch.float32, meta)


def blocks_of_values(shapes: Shapes, V: int) -> int:
    """Programs that share the columns of a head's values."""
    return int(triton.cdiv(V, shapes.meta["BLOCK_V"]))
