"""Compile every Triton kernel for real chips, on a machine that may have none.

    python -m longhaul.kernels.compile [--targets sm_80,sm_90,sm_100,gfx942] [--only TEXT]

prints what each kernel takes of registers, shared memory and stack, and fails when one spills or
does not fit. How it is done is in offline.py; which calls ship is SHAPES.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import io
import itertools
import multiprocessing
import os
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import torch
import triton
from torch import Tensor

from longhaul.kernels.offline import (
    CHIPS,
    INTERPRETED,
    TENSOR_COLUMNS,
    Compiled,
    is_interpreting,
    recording,
)
from longhaul.kernels.power.call import PowerCall, Saved
from longhaul.kernels.power.state import PowerState
from longhaul.kernels.shapes import state_features


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One call that ships: T is two chunks, B is 2 with 8 query heads on 4 key heads.

    The backward pass takes heads in two halves: 2 are compiled as 4 are, but 1 would not be.
    """

    form: Literal["attention", "chunked", "step"]
    degree: int
    K: int
    V: int
    dtype: torch.dtype = torch.bfloat16
    plain: bool = False  # neither gates nor normaliser
    packed: bool = False  # two documents of odd lengths, with initial and final states
    chunk_size: int = 128  # tokens

    @property
    def name(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        marks = " plain" * self.plain + " packed" * self.packed
        return f"{self.form} p{self.degree} K{self.K} V{self.V} {dtype}{marks}"


SHAPES = (
    Shape(form="attention", degree=1, K=64, V=64, plain=True),
    Shape(form="attention", degree=2, K=64, V=64),
    Shape(form="attention", degree=2, K=128, V=128),
    Shape(form="attention", degree=4, K=64, V=64),
    Shape(form="attention", degree=8, K=64, V=64),
    Shape(form="attention", degree=2, K=64, V=64, dtype=torch.float16),
    Shape(form="attention", degree=2, K=64, V=64, dtype=torch.float32),
    Shape(form="attention", degree=2, K=64, V=64, plain=True),
    Shape(form="chunked", degree=1, K=64, V=64),
    Shape(form="chunked", degree=1, K=128, V=128),
    Shape(form="chunked", degree=1, K=256, V=256),
    Shape(form="chunked", degree=2, K=16, V=64),
    Shape(form="chunked", degree=2, K=32, V=64),
    Shape(form="chunked", degree=2, K=64, V=64),
    Shape(form="chunked", degree=2, K=128, V=64),
    Shape(form="chunked", degree=2, K=128, V=128),
    Shape(form="chunked", degree=4, K=16, V=64),
    Shape(form="chunked", degree=4, K=32, V=64),
    Shape(form="chunked", degree=2, K=64, V=64, dtype=torch.float16),
    Shape(form="chunked", degree=2, K=64, V=64, dtype=torch.float32),
    Shape(form="chunked", degree=2, K=64, V=64, plain=True),
    Shape(form="chunked", degree=2, K=64, V=64, packed=True),
    Shape(form="step", degree=1, K=64, V=64),
    Shape(form="step", degree=2, K=64, V=64),
    Shape(form="step", degree=4, K=16, V=64),
    Shape(form="step", degree=2, K=64, V=64, dtype=torch.float16),
    Shape(form="step", degree=2, K=64, V=64, dtype=torch.float32),
)

# Kernels that may spill: a pattern for "shape / kernel / target", and the most bytes of spill loads
# that were looked at and found harmless. Whatever is not listed must not spill at all.
MAY_SPILL: dict[str, int] = {
    # An older chip, which ptxas gives fewer ways around a full register file.
    "* / sm_80": 64,
    # Here ptxas gives up a few registers for another block in flight.
    "* / sm_100": 32,
    # Products in three parts hold both operands twice; whoever wants speed takes bfloat16.
    "* float32* / *": 480,
    "* float16* / *": 160,
    # Accumulators of 256 columns, or two of 128, fill the register file by themselves.
    "* K256 * / *": 320,
    "attention p2 K128 * / _power_bwd_attention_key_kernel / sm_100": 128,
    "chunked p2 K128 * / _power_bwd_key_kernel / sm_90": 32,
    # A tile of degree 4 has 256 features, all of which are built at once.
    "chunked p4 * / _power_fwd_read_kernel / sm_100": 400,
}


def launch(shape: Shape) -> None:
    """Run the launchers of one shape, forward and backward, on tensors without meaningful data."""
    # By name: compiling other kernels must work where these cannot be imported.
    power = importlib.import_module("longhaul.kernels.power.triton")
    B, T, H, G = 2, 2 * shape.chunk_size, 8, 4
    if shape.packed:
        B, T = 1, T + 1
    P = state_features(shape.K, shape.degree)
    offsets = torch.tensor([0, shape.chunk_size // 2 + 1, T]) if shape.packed else None
    num_states = B if offsets is None else len(offsets) - 1
    gate = functools.partial(torch.zeros, dtype=torch.float32)
    scale = shape.K**-0.5

    def tokens(*sizes: int) -> Tensor:
        return torch.zeros(*sizes, dtype=shape.dtype)

    if shape.form == "step":
        power.step(
            PowerState(torch.zeros(B, G, P, shape.V), torch.zeros(B, G, P)),
            tokens(B, 1, H, shape.K),
            tokens(B, 1, G, shape.K),
            tokens(B, 1, G, shape.V),
            None if shape.plain else gate(B, 1, G),
            degree=shape.degree,
            scale=scale,
            normalize=not shape.plain,
            inplace=False,
        )
        return
    call = PowerCall(
        degree=shape.degree,
        scale=scale,
        normalize=not shape.plain,
        output_final_state=shape.packed,
        form=shape.form,
        chunk_size=shape.chunk_size,
    )
    q, k, v = tokens(B, T, H, shape.K), tokens(B, T, G, shape.K), tokens(B, T, G, shape.V)
    log_g = None if shape.plain else gate(B, T, G)
    kv = torch.zeros(num_states, G, P, shape.V) if shape.packed else None
    norm = torch.zeros(num_states, G, P) if shape.packed else None
    inputs = (q, k, v, log_g, kv, norm)
    after = power.forward(call, *inputs, offsets)
    saved = Saved(*inputs, offsets, after.out, after.kv, after.norm, after.inverse, after.is_live)
    needs = tuple(x is not None for x in inputs)
    power.backward(call, saved, torch.zeros_like(after.out), after.kv, after.norm, needs)


def _compile_shape(task: tuple[Shape, str]) -> tuple[Shape, str, list[Compiled], str | None]:
    shape, target = task
    torch.set_num_threads(1)
    compiled: list[Compiled] = []
    try:
        # A failing ptxas makes Triton print a thousand lines of PTX; the error says what is wrong.
        with contextlib.redirect_stdout(io.StringIO()), recording(target) as compiled:
            launch(shape)
    except Exception as error:  # whatever one shape raises, the table of the others is wanted
        cause: BaseException = error
        while cause.__cause__ is not None:  # Triton's innermost error is the one that tells
            cause = cause.__cause__
        return shape, target, compiled, f"{type(cause).__name__}: {cause}"
    return shape, target, compiled, None if compiled else "launched no kernel"


def faults(compiled: Compiled, place: str) -> list[str]:
    """Why this kernel may not ship."""
    found = []
    limit = CHIPS[compiled.target].shared_bytes
    if compiled.shared_bytes > limit:
        found.append(f"needs {compiled.shared_bytes} bytes of shared memory, the chip has {limit}")
    if compiled.tensor_columns > TENSOR_COLUMNS:
        found.append(
            f"needs {compiled.tensor_columns} columns of tensor memory, the chip has "
            f"{TENSOR_COLUMNS}"
        )
    allowed = max((size for p, size in MAY_SPILL.items() if fnmatchcase(place, p)), default=0)
    if max(compiled.spill_loads, compiled.spill_stores) > allowed:
        found.append(
            f"spills: {compiled.spill_stores} bytes stored and {compiled.spill_loads} loaded by a "
            f"thread, {allowed} allowed"
        )
    return [f"{place}: {fault}" for fault in found]


_COLUMNS = (
    f"{'shape':36} {'kernel':32} {'target':6} {'regs':>4} {'shared':>6} {'stack':>6} "
    f"{'stores':>6} {'loads':>6} {'products':>14} {'s':>5}  configuration"
)


def row(compiled: Compiled, shape: str = "") -> str:
    """A line of the table."""
    c = compiled
    return (
        f"{shape:36} {c.kernel:32} {c.target:6} {c.registers:4} {c.shared_bytes:6} "
        f"{c.stack_bytes:6} {c.spill_stores:6} {c.spill_loads:6} {c.products or '-':>14} "
        f"{c.seconds:5.1f}  {c.config}"
    )


def print_table(tasks: Iterable[tuple[Shape, str]], *, folders: bool) -> list[str]:
    """Compile shapes for targets, print a row for every kernel that differs; what is wrong."""
    found = []
    seen = set()
    workers = min(8, len(os.sched_getaffinity(0)))
    print(_COLUMNS, flush=True)
    # A fresh process for each worker: a forked one may inherit a lock that torch's threads hold.
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for shape, target, compiled, error in pool.map(_compile_shape, tasks):
            for kernel in compiled:
                if kernel.digest in seen:
                    continue
                seen.add(kernel.digest)
                print(row(kernel, shape.name), flush=True)
                if folders:
                    print(f"    {kernel.folder}", flush=True)
                found += faults(kernel, f"{shape.name} / {kernel.kernel} / {target}")
            if error is not None:
                found.append(f"{shape.name} / {target}: {error}")
    print(f"{len(seen)} kernels, {len(found)} faults, triton {triton.__version__}")
    return found


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="longhaul.kernels.compile", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--targets", default="sm_80,sm_90,sm_100", help="of " + ", ".join(CHIPS))
    parser.add_argument(
        "--only", default="", help="shapes with this in their name, and where their PTX lies"
    )
    options = parser.parse_args(arguments)
    targets = options.targets.split(",")
    if unknown := set(targets) - set(CHIPS):
        parser.error(f"--targets: found {min(unknown)!r}, wanted some of {', '.join(CHIPS)}")
    shapes = [shape for shape in SHAPES if options.only in shape.name]
    if not shapes:
        parser.error(
            f"--only: found {options.only!r}, wanted part of a name such as {SHAPES[0].name!r}"
        )
    if is_interpreting():
        parser.error(INTERPRETED)
    tasks = itertools.product(shapes, targets)
    found = print_table(tasks, folders=bool(options.only))
    for fault in found:
        print(fault, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
