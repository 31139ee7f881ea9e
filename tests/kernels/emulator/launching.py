"""A driver for Triton whose launches compile for an absent chip and run in the emulator."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
from machine import Kernel
from memories import GlobalMemory
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from longhaul.kernels import backend
from longhaul.kernels.offline.compilation import CHIPS, INTERPRETED, FakeDriver


class Launch(NamedTuple):
    """One launch, of which nothing failed."""

    kernel: str
    config: str  # warps, stages and block sizes, as kernels/offline prints them


def _end_with_ptx(
    self: Any = None,
    stages: Any = None,
    options: Any = None,
    language: Any = None,
    capability: Any = None,
) -> tuple[str, str] | None:
    """Leave ptxas out: the "binary" is PTX. Without arguments: what names it in Triton's cache."""
    if stages is None:
        return "emulated", "emulated"
    stages["cubin"] = lambda text, metadata: text.encode()
    return None


class _Utilities:
    """What Triton asks of its driver's C library."""

    def __init__(self, shared_bytes: int, rewrite: Callable[[str], str]) -> None:
        self._shared_bytes = shared_bytes
        self._rewrite = rewrite

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": self._shared_bytes}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        """Module, function, registers, spills, and the largest number of threads."""
        kernel = Kernel(self._rewrite(binary.decode()), shared)
        return kernel, kernel, 0, 0, 1024


class _Launcher:
    """Called as Triton calls what it compiles from C."""

    def __init__(self, launches: list[Launch], src: Any, metadata: Any) -> None:
        self._launches = launches
        self._kinds = list(src.signature.values())
        sizes = {src.fn.arg_names[place[0]]: value for place, value in src.constants.items()}
        words = [f"warps={metadata.num_warps}", f"stages={metadata.num_stages}"]
        words += [f"{name}={x}" for name, x in sizes.items() if name.startswith("BLOCK_")]
        self._launch = Launch(src.fn.__name__, " ".join(words))

    def __call__(
        self,
        x: int,
        y: int,
        z: int,
        stream: int,
        kernel: Kernel,
        packed_metadata: Any,
        launch_metadata: Any,
        enter: Any,
        leave: Any,
        *arguments: Any,
    ) -> None:
        memory = GlobalMemory()
        bits = [
            _bits(value, kind, memory)
            for value, kind in zip(arguments, self._kinds, strict=True)
            if kind != "constexpr"
        ]
        memory.copy_in()
        kernel.run(memory, bits, (x, y, z))
        memory.copy_out()
        self._launches.append(self._launch)


def _bits(value: Any, kind: str, memory: GlobalMemory) -> int:
    """An argument as the integer that stands in the kernel's parameters."""
    if isinstance(value, Tensor):
        return memory.pointer(value)
    if kind == "fp32":
        return int(np.float32(value).view(np.uint32))
    return int(value)


class _Driver(FakeDriver):
    """A chip that is not there, on which launches run nevertheless."""

    def __init__(self, target: str, launches: list[Launch], rewrite: Callable[[str], str]) -> None:
        super().__init__(CHIPS[target])
        self.utils = _Utilities(CHIPS[target].shared_bytes, rewrite)
        self.launcher_cls = lambda src, metadata: _Launcher(launches, src, metadata)


@contextlib.contextmanager
def emulating(target: str, rewrite: Callable[[str], str] = str) -> Iterator[list[Launch]]:
    """Run launches on CPU tensors as a chip would; each that ends joins the list.

    Args:
        target: "sm_80" or "sm_90".
        rewrite: changes the PTX of every kernel, to plant a fault.

    Raises (where kernels are launched):
        FaultError: an access or a race that memories.py describes.
    """
    if knobs.runtime.interpret:
        raise RuntimeError(INTERPRETED)
    launches: list[Launch] = []
    with (
        patch.object(driver, "_active", _Driver(target, launches, rewrite)),
        patch.object(knobs.runtime, "add_stages_inspection_hook", _end_with_ptx),
        patch.object(backend, "why_unavailable", lambda name, device: None),
    ):
        yield launches
