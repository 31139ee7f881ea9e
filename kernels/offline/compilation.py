"""Compile what Triton would compile for a chip that is absent, and measure the resources it needs.

The launchers run on small CPU tensors with a fake driver that reports the chip, and every launch
stops after compiling. So each kernel is compiled with the specialisation and the flags that it
would have on the chip, and no list of signatures is needed.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import JITFunction, driver
from triton.runtime.interpreter import InterpretedFunction


@dataclass(frozen=True)
class Chip:
    """A chip as Triton describes it, and the shared memory that a thread block may use."""

    target: GPUTarget
    shared_bytes: int


# Columns of tensor memory on the chips that have it. Triton checks this only when it launches.
TENSOR_COLUMNS = 512

# CUDA C++ programming guide, "technical specifications per compute capability": an SM has one KiB
# more, reserved for the system. CDNA 3 instruction set: 64 KiB of local data share per workgroup.
CHIPS = {
    "sm_80": Chip(GPUTarget("cuda", 80, 32), 163 * 1024),
    "sm_86": Chip(GPUTarget("cuda", 86, 32), 99 * 1024),
    "sm_89": Chip(GPUTarget("cuda", 89, 32), 99 * 1024),
    "sm_90": Chip(GPUTarget("cuda", 90, 32), 227 * 1024),
    "sm_100": Chip(GPUTarget("cuda", 100, 32), 227 * 1024),
    "sm_120": Chip(GPUTarget("cuda", 120, 32), 99 * 1024),
    "gfx942": Chip(GPUTarget("hip", "gfx942", 64), 64 * 1024),
}


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """One compiled kernel. Bytes of stack and spills are per thread."""

    kernel: str
    target: str
    config: str
    digest: str  # Triton's own name for this kernel, specialisation, options and target
    folder: Path  # in Triton's cache: .source, .ttir, .ttgir, .llir, .ptx, .cubin
    registers: int
    shared_bytes: int
    tensor_columns: int  # of Blackwell's tensor memory
    stack_bytes: int
    spill_stores: int
    spill_loads: int
    products: str  # number of matrix instructions by kind
    seconds: float  # of compiling; nearly 0 if the kernel was in Triton's cache


class FakeDriver:
    """The part of Triton's driver that compiling needs, for a chip that is not there."""

    # JITFunction caches compiled kernels by device, so every driver gets a new device number, far
    # from the numbers of real devices.
    _numbers = itertools.count(1_000_000)

    def __init__(self, chip: Chip) -> None:
        self._number = next(self._numbers)
        self._target = chip.target

    def get_current_device(self) -> int:
        return self._number

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


INTERPRETED = (
    "TRITON_INTERPRET: found it set, so kernels are interpreted and cannot be compiled; wanted a "
    "process without it"
)


def is_interpreting() -> bool:
    """Whether kernels imported now would be interpreted."""
    return bool(knobs.runtime.interpret)


@contextlib.contextmanager
def recording(target: str) -> Iterator[list[Compiled]]:
    """Make launches compile for the target without running; each compiled kernel joins the list.

    A launcher finds the chip with triton.runtime.driver.active.get_current_target().
    """
    if is_interpreting():
        raise RuntimeError(INTERPRETED)
    compiled: list[Compiled] = []

    def listen(
        *, src: Any, metadata: dict[str, Any], metadata_group: Any, times: Any, **_: Any
    ) -> None:
        compiled.append(_measure(target, src, metadata, metadata_group, times.total / 1e6))

    run = JITFunction.run

    def compile_only(self: Any, *args: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(self, *args, warmup=True, **kwargs)

    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(INTERPRETED)

    with contextlib.ExitStack() as changes:
        for place, name, value in (
            (JITFunction, "run", compile_only),
            (InterpretedFunction, "run", refuse),
            (knobs.compilation, "listener", listen),
            (driver, "_active", FakeDriver(CHIPS[target])),
        ):
            changes.callback(setattr, place, name, getattr(place, name))
            setattr(place, name, value)
        yield compiled


@contextlib.contextmanager
def skipping(target: str) -> Iterator[None]:
    """Make launchers allocate what they would on the target, while launches do nothing."""

    def skip(self: Any, *args: Any, **kwargs: Any) -> None:
        return None

    with contextlib.ExitStack() as changes:
        for place, name, value in (
            (JITFunction, "run", skip),
            (InterpretedFunction, "run", skip),
            (driver, "_active", FakeDriver(CHIPS[target])),
        ):
            changes.callback(setattr, place, name, getattr(place, name))
            setattr(place, name, value)
        yield


def _measure(
    target: str, src: Any, metadata: dict[str, Any], files: dict[str, str], seconds: float
) -> Compiled:
    by_suffix = {Path(path).suffix: Path(path) for path in files.values()}
    constants = {src.fn.arg_names[place[0]]: value for place, value in src.constants.items()}
    config = [f"warps={metadata['num_warps']}", f"stages={metadata['num_stages']}"]
    config += [
        f"{param.name}={constants[param.name]}"
        for param in src.fn.params
        if param.is_constexpr and param.name in constants
    ]
    if ".cubin" in by_suffix:
        resources = _nvidia_resources(target, metadata, by_suffix[".cubin"], by_suffix[".ptx"])
        code = by_suffix[".ptx"].read_text()
        kinds = r"\b(wgmma)\.mma_async|\b(tcgen05)\.mma\b|\b(mma\.sync)"
    else:
        code = by_suffix[".amdgcn"].read_text()
        resources = _amd_resources(code)
        kinds = r"\b(v_mfma)_"
    found = ["".join(kind) for kind in re.findall(kinds, code)]
    return Compiled(
        kernel=src.fn.__name__,
        target=target,
        config=" ".join(config),
        digest=metadata["hash"],
        folder=by_suffix[".json"].parent,
        shared_bytes=metadata["shared"],
        tensor_columns=metadata.get("tmem_size") or 0,
        products=" ".join(f"{found.count(kind)} {kind}" for kind in sorted(set(found))),
        seconds=seconds,
        **resources,
    )


def _nvidia_resources(
    target: str, metadata: dict[str, Any], cubin: Path, ptx: Path
) -> dict[str, int]:
    usage = subprocess.run(
        [knobs.nvidia.cuobjdump.path, "-res-usage", cubin],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    sizes = {name: int(size) for name, size in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    stores = loads = 0
    if sizes["STACK"] or sizes["LOCAL"]:
        # Only ptxas tells spills from other uses of the stack. Running it again is slow, so only
        # kernels with a stack need it. Triton's own stage repeats the flags of the first run.
        backend = make_backend(CHIPS[target].target)
        log = io.StringIO()
        with knobs.nvidia.scope(), contextlib.redirect_stdout(log):
            knobs.nvidia.dump_ptxas_log = True
            options = backend.parse_options(metadata)
            backend.make_cubin(ptx.read_text(), {}, options, CHIPS[target].target.arch)
        spilled = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log.getvalue())
        stores, loads = (
            sum(column) for column in zip(*(map(int, s) for s in spilled), strict=True)
        )
    return {
        "registers": sizes["REG"],
        "stack_bytes": sizes["STACK"] + sizes["LOCAL"],
        "spill_stores": stores,
        "spill_loads": loads,
    }


def _amd_resources(code: str) -> dict[str, int]:
    sizes = {name: int(size) for name, size in re.findall(r"\.(\w+): +(\d+)$", code, re.MULTILINE)}
    # The compiler counts spilled registers, not bytes; each has four bytes and is written once and
    # read at least once. Scalar registers spill into vector registers and use no memory.
    spilled = 4 * sizes["vgpr_spill_count"]
    return {
        "registers": sizes["vgpr_count"],
        "stack_bytes": sizes["private_segment_fixed_size"],
        "spill_stores": spilled,
        "spill_loads": spilled,
    }
