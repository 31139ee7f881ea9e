"""Time, memory and kernels of calls, measured one task at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from longhaul.kernels.power.cost import choose_chunk_size, power_backward_flops, power_flops
from longhaul.kernels.shapes import state_features
from longhaul.kernels.verify.peers import (
    RETENTION_CHUNKS,
    Shape,
    chosen_kernels,
    decoding_call,
    training_call,
)

_KERNELS_LISTED = 24
_DECODED_STATES = 4


What = Literal["training", "profile", "decoding", "decoding, as a graph", "matmul", "copy"]


@dataclass(frozen=True, kw_only=True)
class Task:
    """One measurement: what is measured, of which implementation, for which row of the table."""

    what: What
    row: str
    implementation: str = "longhaul"
    shape: Shape = field(default_factory=Shape)
    device: str = "cuda"
    size: int = 8192  # of the square matrices; the copy moves 16 · size² bytes


def measure(task: Task) -> dict[str, Any]:
    """The results of a task. Times are medians in milliseconds, beside the middle 60 %."""
    device = torch.device(task.device)
    if task.what == "training":
        return _measure_training(task, device)
    if task.what == "profile":
        return {"kernels": _kernel_times(task, device)}
    if task.what == "matmul":
        a, b = (torch.randn(task.size, task.size, device=device).bfloat16() for _ in range(2))
        times = _time(lambda: a @ b, device)
        return times | {"tflops": 2 * task.size**3 / times["ms"] / 1e9}
    if task.what == "copy":
        source = torch.randint(255, (task.size, 16, task.size), dtype=torch.uint8, device=device)
        target = source.clone()
        times = _time(lambda: target.copy_(source), device)
        return times | {"gb_per_s": 2 * source.numel() / times["ms"] / 1e6}
    num_states = 1 if task.implementation == "sdpa flash" else _DECODED_STATES
    with chosen_kernels(task.implementation):
        step = decoding_call(task.implementation, task.shape, device, num_states)
        times = _time(step, device, is_graph=task.what == "decoding, as a graph")
    return {"ms": times["ms"] / num_states, "ms_range": [x / num_states for x in times["ms_range"]]}


def _measure_training(task: Task, device: torch.device) -> dict[str, Any]:
    shape = task.shape
    with chosen_kernels(task.implementation):
        call = training_call(task.implementation, shape, device)
        dout = torch.randn_like(call.forward())

        def forward() -> Tensor:
            with torch.no_grad():
                return call.forward()

        def both() -> tuple[Tensor, ...]:
            return torch.autograd.grad(call.forward(), call.leaves, dout)

        both()
        result: dict[str, Any] = {"peak_bytes": _peak_bytes(both, device)}
        for name, function in (("forward", forward), ("forward_backward", both)):
            times = _time(function, device)
            result |= {f"{name}_ms": times["ms"], f"{name}_ms_range": times["ms_range"]}
    if task.implementation == "longhaul":
        return result | _useful_work(shape, call.leaves, result)
    if task.implementation != "sdpa flash":
        # How far the peer's output is from ours. Its times are kept even if our call raises.
        with suppress(Exception):
            ours = training_call("longhaul", shape, device).forward()
            result["differs_by"] = ((forward() - ours).float().norm() / ours.float().norm()).item()
    return result


def _useful_work(shape: Shape, leaves: list[Tensor], result: dict[str, Any]) -> dict[str, Any]:
    """FLOP rates according to the cost model, and the memory that is allowed."""
    if shape.form == "auto":
        return {}
    C = choose_chunk_size(shape.T, shape.K, shape.K, shape.degree, "triton")
    sizes = (shape.T, shape.K, shape.K, shape.degree, shape.form, C)
    heads = shape.B * shape.H
    flops = heads * power_flops(*sizes)
    total = flops + heads * power_backward_flops(*sizes)
    work: dict[str, Any] = {
        "forward_tflops": flops / result["forward_ms"] / 1e9,
        "forward_backward_tflops": total / result["forward_backward_ms"] / 1e9,
    }
    if shape.form == "chunked":
        state_bytes = 4 * state_features(shape.K, shape.degree) * (shape.K + 1)
        inputs = sum(x.numel() * x.element_size() for x in leaves)
        work["allowed_bytes"] = 4 * inputs + heads * -(-shape.T // C) * state_bytes
    return work


def _peak_bytes(function: Callable[[], object], device: torch.device) -> int | None:
    """Peak of allocated memory during a call, inputs included."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def _time(
    function: Callable[[], object], device: torch.device, *, is_graph: bool = False
) -> dict[str, Any]:
    """Median and middle 60 % of a call in milliseconds; only a CUDA graph finds a warm cache."""
    quantiles = [0.5, 0.2, 0.8]
    if device.type != "cuda":
        middle, low, high = _time_on_cpu(function)
    else:
        # Triton takes long to import.
        from triton.testing import do_bench, do_bench_cudagraph

        torch.cuda.synchronize()
        if is_graph:
            # Decoders run as a CUDA graph, without the gaps between launches.
            middle, low, high = do_bench_cudagraph(function, rep=50, quantiles=quantiles)
        else:
            middle, low, high = do_bench(function, warmup=50, rep=300, quantiles=quantiles)
    return {"ms": middle, "ms_range": [low, high]}


def _time_on_cpu(function: Callable[[], object]) -> tuple[float, float, float]:
    """Fastest, median and slowest of three runs; only tests use it."""
    times = []
    for _ in range(3):
        started = time.perf_counter()
        function()
        times.append((time.perf_counter() - started) * 1e3)
    low, middle, high = sorted(times)
    return middle, low, high


def _kernel_times(task: Task, device: torch.device) -> list[dict[str, Any]]:
    """Milliseconds that each kernel of one forward and backward pass takes, slowest first."""
    call = training_call(task.implementation, task.shape, device)
    dout = torch.randn_like(call.forward())

    def both() -> None:
        torch.autograd.grad(call.forward(), call.leaves, dout)
        if device.type == "cuda":
            torch.cuda.synchronize()

    both()
    is_cuda = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU]) as run:
        both()
    kernels = [
        {
            "kernel": event.key[:120],
            "launches": event.count,
            "ms": (event.self_device_time_total if is_cuda else event.self_cpu_time_total) / 1e3,
        }
        for event in run.key_averages()
    ]
    return sorted(kernels, key=lambda kernel: -kernel["ms"])[:_KERNELS_LISTED]


@contextmanager
def untimed_tuning(part: int = 0, parts: int | None = None) -> Iterator[None]:
    """Make Triton's autotuner run its first configuration, or every `parts`-th, without timing.

    Compiled kernels stay in Triton's cache on disk, where a later run with timing finds them. No
    choice of a configuration is stored, as the device may be busy with other work.
    """
    # Triton takes long to import.
    from triton.compiler.errors import CompileTimeAssertionFailure
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.errors import OutOfResources, PTXASError

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        configs = self.prune_configs(kwargs)
        chosen = configs[:1] if parts is None else configs[part::parts] or configs[:1]
        result = None
        for config in chosen:
            settings = config.all_kwargs()
            if config.pre_hook is not None:
                config.pre_hook(self.nargs | kwargs | settings)
            try:
                result = self.fn.run(*args, **kwargs, **settings)
            except (CompileTimeAssertionFailure, OutOfResources, PTXASError):
                # Some of several configurations may not fit the chip; a single one must.
                if parts is None:
                    raise
        return result

    with patch.object(Autotuner, "run", run):
        yield


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """Every `parts`-th configuration, from number `part`, that the autotuner tries for a task."""

    task: Task
    part: int
    parts: int

    def run(self) -> None:
        """Compile into Triton's cache; a peer that is not installed is skipped."""
        task, device = self.task, torch.device(self.task.device)
        with untimed_tuning(self.part, self.parts), suppress(ImportError):
            if task.what.startswith("decoding"):
                decoding_call(task.implementation, task.shape, device, 1)()
            else:
                call = training_call(task.implementation, task.shape, device)
                out = call.forward()
                torch.autograd.grad(out, call.leaves, torch.ones_like(out))
            if device.type == "cuda":
                torch.cuda.synchronize()


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of all checks and measurements; tests on a CPU use smaller ones."""

    case_tokens: int = 131_073
    case_width: int = 256
    tokens: int = 65_536
    attention_tokens: int = 8192
    crossover_tokens: tuple[int, ...] = (1024, 2048, 4096, 8192, 16_384)
    heads: int = 8
    widths: tuple[int, int] = (64, 32)
    decoding_batch: int = 8
    matmul: int = 8192


def tasks_of(sizes: Sizes, device: str) -> list[Task]:
    """Every measurement, the most important first; the last may use up all remaining time."""
    T, H, (wide, narrow) = sizes.tokens, sizes.heads, sizes.widths
    headline = Shape(T=T, H=H, K=wide)
    rows = {
        "degree 2, K 64": headline,
        "degree 1, K 64": replace(headline, degree=1, normalize=False),
        "degree 2, K 32": replace(headline, K=narrow),
        "attention form": replace(headline, T=sizes.attention_tokens, form="attention"),
    }
    rows_auto = {f"T {T}": replace(headline, T=T, form="auto") for T in sizes.crossover_tokens}

    def training(row: str, shape: Shape, *peers: str) -> list[Task]:
        return [
            Task(
                what="training", row=row, implementation=implementation, shape=shape, device=device
            )
            for implementation in peers
        ]

    tasks = [Task(what="matmul", row="matmul", device=device, size=sizes.matmul)]
    for row, shape in rows.items():
        tasks += training(row, shape, "longhaul", "sdpa flash")
    tasks += training("degree 1, K 64", rows["degree 1, K 64"], "chunk_simple_gla")
    tasks += [
        Task(what="profile", row=row, shape=shape, device=device) for row, shape in rows.items()
    ]
    decoding: tuple[What, What] = ("decoding", "decoding, as a graph")
    shape = replace(headline, B=sizes.decoding_batch)
    tasks += [
        Task(what=what, row=what, implementation=implementation, shape=shape, device=device)
        for what in decoding
        for implementation in ("longhaul", "sdpa flash")
    ]
    for row, shape in rows_auto.items():
        tasks += training(row, shape, "longhaul", "sdpa flash")
    tasks.append(Task(what="copy", row="copy", device=device, size=sizes.matmul))
    # Its autotuner tries some 300 configurations.
    retention = (f"retention, chunk {C}" for C in RETENTION_CHUNKS)
    return tasks + training("degree 2, K 64", headline, *retention)


def compilations_of(tasks: Iterable[Task]) -> list[Compilation]:
    """What several processes compile beforehand; peers with much to tune are split into parts."""
    # retention tunes the same kernels for every chunk size; the longest chunks take least memory.
    parts = {"longhaul": 1, "chunk_simple_gla": 2, f"retention, chunk {max(RETENTION_CHUNKS)}": 12}
    return [
        Compilation(task=task, part=part, parts=parts[task.implementation])
        for task in tasks
        if task.what in ("training", "decoding") and task.shape.form != "auto"
        for part in range(parts.get(task.implementation, 0))
    ]
