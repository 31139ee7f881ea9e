"""What all launchers share: dtypes and precision of matrix products, layouts, autotuning."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Operands(NamedTuple):
    """Dtype and precision of the operands of matrix products, which accumulate in float32."""

    dtype: Any  # a Triton dtype
    precision: str  # of products of float32 operands


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU."""
    return bool(triton.knobs.runtime.interpret)


def operands_of(q: Tensor) -> Operands:
    """Keep bfloat16, use TF32 for float16, and three TF32 products for float32.

    TF32 represents every float16 number, while powers of float16 scores would overflow in float16.
    Three TF32 products are within a few roundings of IEEE float32, in a fraction of its time.
    """
    if q.dtype == torch.bfloat16:
        return Operands(tl.bfloat16, "tf32")
    if is_interpreted() or triton.runtime.driver.active.get_current_target().backend == "hip":
        return Operands(tl.float32, "ieee")
    return Operands(tl.float32, "tf32" if q.dtype == torch.float16 else "tf32x3")


def with_dense_rows(x: Tensor) -> Tensor:
    """x itself if its last dimension is contiguous, else a contiguous copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def block_of(width: int) -> int:
    """A width padded to a size that `tl.dot` accepts."""
    return max(16, int(triton.next_power_of_2(width)))


Configs = tuple[triton.Config, ...]


def config(num_warps: int, num_stages: int, **sizes: int) -> triton.Config:
    """A configuration of a kernel: block sizes, warps, stages of the load pipeline."""
    return triton.Config(sizes, num_warps=num_warps, num_stages=num_stages)


def launch(
    kernel: Any,
    grid: Callable[[dict[str, Any]], tuple[int, ...]],
    configs: Configs,
    *args: Any,
    **meta: Any,
) -> None:
    """Run a kernel with the fastest of a few configurations.

    Triton's autotuner finds it once for each set of compile-time constants and stores it on disk.
    The interpreter cannot tune and uses the first.
    """
    if is_interpreted():
        kernel[grid(meta | configs[0].kwargs)](*args, **meta, **configs[0].all_kwargs())
    else:
        _autotuned(kernel, configs)[grid](*args, **meta)


@lru_cache(maxsize=256)
def _autotuned(kernel: Any, configs: Configs) -> Any:
    # The key omits sizes of the data, so that a new sequence length needs no new search. It also
    # omits DOT, which cannot be written to a file and follows from the dtypes of the tensors.
    chosen = {"DOT", *configs[0].kwargs}
    key = [p.name for p in kernel.params if p.is_constexpr and p.name not in chosen]
    return triton.autotune(configs=list(configs), key=key, cache_results=True)(kernel)
