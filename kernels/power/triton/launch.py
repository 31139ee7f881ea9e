"""What every launcher decides alike: operand dtypes, precision, layouts."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Operands(NamedTuple):
    """How matrix products take their operands. They always accumulate in float32."""

    dtype: Any  # a Triton dtype
    precision: str  # of products of float32 operands


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU."""
    return bool(triton.knobs.runtime.interpret)


def operands_of(q: Tensor) -> Operands:
    """bfloat16 stays so. float16 goes through TF32, which holds every float16 number and more.

    Powers of float16 scores would overflow in float16. float32 takes three TF32 products, which
    come within a few roundings of IEEE arithmetic at a fraction of its time.
    """
    if q.dtype == torch.bfloat16:
        return Operands(tl.bfloat16, "tf32")
    if is_interpreted() or triton.runtime.driver.active.get_current_target().backend == "hip":
        return Operands(tl.float32, "ieee")
    return Operands(tl.float32, "tf32" if q.dtype == torch.float16 else "tf32x3")


def with_dense_rows(x: Tensor) -> Tensor:
    """x itself where its last dimension is contiguous, a copy otherwise."""
    return x if x.stride(-1) == 1 else x.contiguous()


def block_of(width: int) -> int:
    """A width padded to what `tl.dot` takes."""
    return max(16, triton.next_power_of_2(width))
