"""Compile shapes for chips: print a row for every kernel, and collect the faults."""

from __future__ import annotations

import contextlib
import io
import itertools
import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from fnmatch import fnmatchcase

import torch
import triton

from longhaul.kernels.offline.compilation import CHIPS, TENSOR_COLUMNS, Compiled, recording

# Kernels that may spill: a pattern for "shape / kernel / target", and the largest number of bytes
# of spill loads that was inspected and found harmless. All other kernels must not spill at all.
MAY_SPILL: dict[str, int] = {
    # On this older chip ptxas has fewer ways around a full register file.
    "* / sm_80": 72,
    # On these chips kernels only have to compile and to fit; on gfx942 the worst ones do not run,
    # as tile_sizes.py names another candidate.
    "* / sm_86": 256,
    "* / sm_89": 256,
    "* / sm_120": 256,
    "* / gfx942": 1024,
    "chunked p1 K256 * / _power_bwd_key_kernel / gfx942": 1352,
    # Here ptxas spills a few registers to fit another block per multiprocessor.
    "* / sm_100": 32,
    # Products of three parts hold both operands twice. Fast runs use bfloat16.
    "* float32* / *": 480,
    "* float16* / *": 160,
    # Accumulators of 256 columns, or two of 128, fill the register file by themselves.
    "* K256 * / *": 320,
    "attention p2 K128 * / _power_bwd_attention_key_kernel / sm_100": 128,
    "chunked p2 K128 * / _power_bwd_key_kernel / sm_90": 32,
    # Stored before the loop over pairs of tokens, and loaded after it.
    "chunked p2 K64 * / _power_bwd_key_kernel / sm_90": 92,
    # Running sums and addresses, stored before the loop over the tokens of a chunk, and loaded
    # after it. On the last two chips another candidate runs, which does not spill.
    "* / _power_fwd_walk_kernel / sm_90": 76,
    "* bfloat16* / _power_fwd_walk_kernel / sm_80": 796,
    "* bfloat16* / _power_fwd_walk_kernel / sm_120": 396,
    # The delta rule: where each channel has a gate, tokens, gates and gradients of 32 channels.
    "delta channel * / sm_90": 716,
    "delta channel * / sm_100": 1200,
    "delta * / _delta_pairs_kernel / sm_90": 96,
    "delta * / _delta_pairs_kernel / sm_100": 72,
    # Chips for which no configuration of it was chosen yet.
    "delta * / sm_80": 1180,
    "delta * / sm_86": 1168,
    "delta * / sm_89": 1168,
    "delta * / sm_120": 1432,
    "delta * K256 * / _delta_walk_back_kernel / *": 1432,
    "delta * / _delta_walk_back_kernel / sm_80": 9288,
}


def _compile(launch: Callable[[], None], target: str) -> tuple[list[Compiled], str | None]:
    """The kernels, and what went wrong."""
    torch.set_num_threads(1)
    compiled: list[Compiled] = []
    try:
        # If ptxas fails, Triton prints a thousand lines of PTX, which the error makes redundant.
        with contextlib.redirect_stdout(io.StringIO()), recording(target) as compiled:
            launch()
    except Exception as error:  # the table shows the other shapes even if one raises
        cause: BaseException = error
        while cause.__cause__ is not None:  # Triton's innermost error names the cause
            cause = cause.__cause__
        return compiled, f"{type(cause).__name__}: {cause}"
    return compiled, None if compiled else "launched no kernel"


def faults(compiled: Compiled, place: str) -> list[str]:
    """Why this kernel is unacceptable; empty if it is fine."""
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
            f"spills: {compiled.spill_stores} bytes stored and {compiled.spill_loads} loaded per "
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


def print_table(
    shapes: Mapping[str, Callable[[], None]], targets: Sequence[str], *, folders: bool
) -> list[str]:
    """Compile shapes for targets, print a row for every distinct kernel, and return the faults."""
    tasks = list(itertools.product(shapes, targets))
    found = []
    seen = set()
    workers = min(8, len(os.sched_getaffinity(0)))
    print(_COLUMNS, flush=True)
    # Spawned rather than forked: a fork may inherit a lock that one of torch's threads holds.
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        launches, chips = [shapes[shape] for shape, _ in tasks], [target for _, target in tasks]
        results = pool.map(_compile, launches, chips)
        for (shape, target), (compiled, error) in zip(tasks, results, strict=True):
            for kernel in compiled:
                if kernel.digest in seen:
                    continue
                seen.add(kernel.digest)
                print(row(kernel, shape), flush=True)
                if folders:
                    print(f"    {kernel.folder}", flush=True)
                found += faults(kernel, f"{shape} / {kernel.kernel} / {target}")
            if error is not None:
                found.append(f"{shape} / {target}: {error}")
    print(f"{len(seen)} kernels, {len(found)} faults, triton {triton.__version__}")
    return found
