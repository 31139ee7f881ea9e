"""What all launchers share: dtypes and precision of matrix products, layouts, configurations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
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


def chip() -> str:
    """The chip that kernels are compiled for: "sm_90", "gfx942", or "interpreter"."""
    if is_interpreted():
        return "interpreter"
    target = triton.runtime.driver.active.get_current_target()
    return f"sm_{target.arch}" if target.backend == "cuda" else str(target.arch)


def chip_of(device: torch.device) -> str:
    """What `chip` is on a GPU, without Triton's driver, which needs a C compiler to start."""
    found = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return str(found.gcnArchName).partition(":")[0]
    return f"sm_{found.major}{found.minor}"


def operands_of(q: Tensor) -> Operands:
    """Keep bfloat16, use TF32 for float16, and three TF32 products for float32.

    TF32 represents every float16 number, while powers of float16 scores would overflow in float16.
    Three TF32 products are within a few roundings of IEEE float32, in a fraction of its time. AMD's
    chips and the interpreter have no TF32.
    """
    has_tf32 = chip().startswith("sm_")
    if q.dtype == torch.bfloat16:
        return Operands(tl.bfloat16, "tf32" if has_tf32 else "ieee")
    if not has_tf32:
        return Operands(tl.float32, "ieee")
    return Operands(tl.float32, "tf32" if q.dtype == torch.float16 else "tf32x3")


def with_dense_rows(x: Tensor) -> Tensor:
    """x itself if its last dimension is contiguous, else a contiguous copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def strides(*tensors: Tensor) -> tuple[int, ...]:
    """The strides of batch, time and heads of tensors (B, T, heads, width), one after the other."""
    return tuple(stride for x in tensors for stride in x.stride()[:3])


def block_of(width: int) -> int:
    """A width padded to a size that `tl.dot` accepts."""
    return max(16, int(triton.next_power_of_2(width)))


class Candidates(NamedTuple):
    """Configurations that a kernel can run with, and which of them it runs with on each chip.

    The choice is fixed in the code. If each process timed them for itself, ranks, nodes and resumed
    runs could choose apart, and their results would differ in the last bits.
    """

    configs: tuple[triton.Config, ...]
    chosen: Mapping[str, int] = MappingProxyType({})  # index by chip, as `chip` names it; else 0

    def on(self, chip: str) -> int:
        """The index of the configuration that runs on a chip."""
        return self.chosen.get(chip, 0)


def candidates(*configs: triton.Config, **chosen: int) -> Candidates:
    """Candidates, with the indices of the chips on which the first does not run."""
    return Candidates(configs, MappingProxyType(chosen))


def config(num_warps: int, num_stages: int, **sizes: int) -> triton.Config:
    """A configuration of a kernel: block sizes, warps, stages of the load pipeline."""
    return triton.Config(sizes, num_warps=num_warps, num_stages=num_stages)


# Of the process and not of a thread, as autograd runs backward passes in threads of its own.
_forced: int | None = None


@contextmanager
def configuration(index: int) -> Iterator[None]:
    """Run candidate `index` of every kernel, or its last one: to check or time it.

    States of chunks are summed and scanned with index 0, and computed by walking with others, where
    walking is possible. It holds in all threads of the process, one index at a time.
    """
    global _forced
    before, _forced = _forced, index
    try:
        yield
    finally:
        _forced = before


def forced_candidate() -> int | None:
    """The index given to `configuration`, where one is in force."""
    return _forced


def launch(
    kernel: Any,
    grid: Callable[[dict[str, Any]], tuple[int, ...]],
    candidates: Candidates,
    *args: Any,
    **meta: Any,
) -> None:
    """Run a kernel with the configuration of the chip."""
    index = _forced
    if index is None:
        # Asking the driver for the chip takes microseconds, of which a launch has few.
        index = candidates.on(chip()) if candidates.chosen else 0
    config = candidates.configs[min(index, len(candidates.configs) - 1)]
    kernel[grid(meta | config.kwargs)](*args, **meta, **config.all_kwargs())
