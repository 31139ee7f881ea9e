"""Sizes of a call's kernels, and memory for what they leave to each other."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from longhaul.kernels.common.triton.launch import block_of, chip, operands_of

# Columns of values, and channels of keys, that a program has at a time. Where each channel has a
# gate, it has more to keep of each.
_BLOCK = 64
_BLOCK_OF_CHANNELS = 32


class Shapes(NamedTuple):
    """Of one call."""

    G: int
    K: int
    dtype: torch.dtype  # of the operands of products
    meta: dict[str, Any]  # constants of every kernel

    @property
    def blocks_of_keys(self) -> int:
        """Programs that share a head's key channels."""
        return int(triton.cdiv(self.K, self.meta["BLOCK_K"]))

    @property
    def padded_width(self) -> int:
        """Key channels of a program that has all of them."""
        return max(_BLOCK, block_of(self.K))

    def scratch(self, like: Tensor, *shape: int) -> Tensor:
        """Memory for operands of products."""
        return like.new_empty(shape, dtype=self.dtype)


def shapes_of(k: Tensor, log_g: Tensor, chunk_size: int) -> Shapes:
    """The sizes of a call with these tensors."""
    G, K = k.shape[2:]
    operands = operands_of(k)
    is_narrow = operands.dtype == tl.bfloat16
    block_c = block_of(chunk_size)
    has_channels = log_g.ndim == 4
    meta = {
        "CHANNELS": has_channels,
        "BLOCK_C": block_c,
        "LEVELS": block_c.bit_length() - 1,
        "BLOCK_K": _BLOCK_OF_CHANNELS if has_channels else _BLOCK,
        "BLOCK": _BLOCK,
        "DOT": operands.dtype,
        "PRECISION": operands.precision,
        # Of sums of gates, and of the inverse and what it multiplies, whose errors would add up.
        "EXACT": ("bf16x3" if is_narrow else "tf32x3") if chip().startswith("sm_") else "ieee",
    }
    dtype = torch.bfloat16 if is_narrow else torch.float32
    return Shapes(G, K, dtype, meta)
