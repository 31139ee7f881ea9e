"""Time, memory and kernels of calls of the op and its peers, measured one task at a time."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch.profiler import ProfilerActivity, profile

from longhaul.kernels.power.cost import choose_chunk_size, power_backward_flops, power_flops
from longhaul.kernels.power.verify.peers import (
    SDPA,
    Shape,
    chosen_kernels,
    decoding_bytes,
    decoding_call,
    training_call,
)
from longhaul.kernels.shapes import state_features
from longhaul.kernels.verify.candidates import does_not_fit, untimed_tuning, with_candidate
from longhaul.kernels.verify.timing import Timed, relative_difference, time_call, training_times

_KERNELS_LISTED = 24

What = Literal["training", "profile", "decoding", "matmul", "copy"]


@dataclass(frozen=True, kw_only=True)
class Task:
    """One measurement: what is measured, of which implementation, for which row of the table."""

    what: What
    row: str
    implementation: str = "longhaul"
    shape: Shape = field(default_factory=Shape)
    size: int = 8192  # of the square matrices; the copy moves 16 · size² bytes
    with_graph: bool = False  # also as a CUDA graph, without the gaps between launches
    candidate: int | None = None  # the configuration that all kernels run with, not the usual one

    @property
    def name(self) -> str:
        """Its name in the report."""
        return f"{self.what}: {self.row}: {self.implementation}"

    @property
    def is_ours(self) -> bool:
        """Whether it runs this project's code, or PyTorch's alone."""
        return self.implementation.partition(",")[0] in ("longhaul", "torch")

    @property
    def package(self) -> str | None:
        """The module that a peer is imported from; None for what PyTorch and this project bring."""
        if self.implementation.startswith("retention"):
            return "retention"
        return "fla" if self.implementation == "chunk_simple_gla" else None

    def measure(self, device: torch.device) -> dict[str, Any]:
        """The results. Times are medians in milliseconds, beside the middle 60 %.

        Of a candidate that the chip has no room for, the result says only that.

        Raises: ImportError where a peer is not installed.
        """
        try:
            return _measured(self, device)
        except Exception as error:
            if self.candidate is None or not does_not_fit(error):
                raise
            return {"does_not_fit": str(error)}


def _measured(task: Task, device: torch.device) -> dict[str, Any]:
    if task.what == "training":
        return _measure_training(task, device)
    if task.what == "profile":
        with with_candidate(task.candidate):
            return {"kernels": _kernel_times(task, device)}
    if task.what == "matmul":
        a, b = (torch.randn(task.size, task.size, device=device).bfloat16() for _ in range(2))
        times = time_call(lambda: a @ b, device)
        return times | {"tflops": 2 * task.size**3 / times["ms"] / 1e9}
    if task.what == "copy":
        source = torch.randint(255, (task.size, 16, task.size), dtype=torch.uint8, device=device)
        target = source.clone()
        times = time_call(lambda: target.copy_(source), device)
        return times | {"gb_per_s": 2 * source.numel() / times["ms"] / 1e6}
    return _measure_decoding(task, device)


def _measure_decoding(task: Task, device: torch.device) -> dict[str, Any]:
    """Times of one token of one layer, on eager calls, and as a CUDA graph, as decoders run."""
    moved = decoding_bytes(task.implementation, task.shape)
    num_states = 1  # Keys and values of one layer exceed the cache; enough states do.
    if task.implementation not in SDPA and device.type == "cuda":
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        num_states = -(-4 * cache // (moved // 2))  # A state is read and written.
    result: dict[str, Any] = {"bytes": moved}
    with chosen_kernels(task.implementation):
        step = decoding_call(task.implementation, task.shape, device, num_states)
        for suffix in ("", "_graph"):
            times = time_call(step, device, is_graph=bool(suffix))
            result[f"ms{suffix}"] = times["ms"] / num_states
            result[f"ms{suffix}_range"] = [x / num_states for x in times["ms_range"]]
    return result


def _measure_training(task: Task, device: torch.device) -> dict[str, Any]:
    shape = task.shape
    with chosen_kernels(task.implementation):
        call = training_call(task.implementation, shape, device)
        result = training_times(call, device, with_graph=task.with_graph)
    if task.implementation == "longhaul":
        return result | _useful_work(shape, call, result)
    if task.implementation not in SDPA:
        if task.implementation.startswith("retention"):
            # It prefers kernels in CUDA, where their package is there.
            result["runs_on"] = "CUDA (vidrial)" if find_spec("vidrial") else "Triton"
        # How far the peer's output is from ours. Its times are kept even if our call raises.
        with suppress(Exception):
            ours = training_call("longhaul", shape, device)
            result["differs_by"] = relative_difference(call, ours)
    return result


def _useful_work(shape: Shape, call: Timed, result: dict[str, Any]) -> dict[str, Any]:
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
        inputs = sum(x.numel() * x.element_size() for x in call.leaves)
        work["allowed_bytes"] = 4 * inputs + heads * -(-shape.T // C) * state_bytes
    return work


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


def compile_part(task: Task, part: int, parts: int, device: torch.device) -> None:
    """Compile every `parts`-th configuration that a peer's autotuner tries, from number `part`."""
    with untimed_tuning(part, parts):
        call = training_call(task.implementation, task.shape, device)
        out = call.forward()
        torch.autograd.grad(out, call.leaves, torch.ones_like(out))
        if device.type == "cuda":
            torch.cuda.synchronize()
