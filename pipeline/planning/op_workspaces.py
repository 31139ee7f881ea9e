"""Memory that custom ops allocate inside, which tracing on tensors without data does not see."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from longhaul.kernels.backend import assuming_triton
from longhaul.kernels.common.custom_ops import CODE
from longhaul.pipeline.planning.memory_tracker import MemoryTracker

Backend = Literal["torch", "triton"]


@contextmanager
def traced_as(backend: Backend) -> Iterator[None]:
    """Trace ops as they are called where a backend runs; Triton's kernels are not launched."""
    if backend == "torch" or find_spec("triton") is None:
        yield
        return
    # Imported here: Triton is optional, and slow to import.
    from longhaul.kernels.offline import skipping

    with assuming_triton(), skipping("sm_90"):
        yield


class OpWorkspace:
    """Bytes that a custom op needs while it runs, including its results.

    The op's own code runs on `meta` tensors. The result for each call is cached.
    """

    def __init__(self) -> None:
        self._cached: dict[Any, int] = {}

    def __call__(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        name = op.name()
        if name not in CODE:
            return 0
        key = (name, tuple(map(_shape, args)), tuple(sorted(map(str, kwargs.items()))))
        if key not in self._cached:
            # Launchers cache tables for later calls, which must not be fake tensors.
            with unset_fake_temporarily():
                self._cached[key] = _peak_bytes(name, args, kwargs)
        return self._cached[key]


def _peak_bytes(name: str, args: tuple[Any, ...], settings: dict[str, Any]) -> int:
    inputs = [
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        if isinstance(x, Tensor)
        else x
        for x in args
    ]
    tracker = MemoryTracker()
    tracker.assign(inputs, "activations")
    given = sum(tracker.now.values())
    with torch.no_grad(), tracker:
        CODE[name](*inputs, **settings)
    return sum(tracker.peak.values()) - given


def _shape(x: Any) -> Any:
    return (tuple(x.shape), x.stride(), x.dtype) if isinstance(x, Tensor) else x
