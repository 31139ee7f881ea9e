"""Time and memory of calls: medians in milliseconds, beside the middle 60 %."""

from __future__ import annotations

import timeit
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Timed(NamedTuple):
    """A call to time: `forward()` returns one tensor, with gradients for all leaves."""

    forward: Callable[[], Tensor]
    leaves: list[Tensor]


def training_times(
    call: Timed, device: torch.device, *, with_graph: bool = False
) -> dict[str, Any]:
    """Times of a forward pass, and of both passes, and the peak memory of both.

    Args:
        with_graph: also as a CUDA graph, without the gaps between launches.
    """
    dout = torch.randn_like(call.forward())

    def forward() -> Tensor:
        with torch.no_grad():
            return call.forward()

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(call.forward(), call.leaves, dout)

    both()
    result: dict[str, Any] = {"peak_bytes": _peak_bytes(both, device)}
    for name, function in (("forward", forward), ("forward_backward", both)):
        for suffix in ("", "_graph") if with_graph else ("",):
            times = time_call(function, device, is_graph=bool(suffix))
            result[f"{name}_ms{suffix}"] = times["ms"]
            result[f"{name}_ms{suffix}_range"] = times["ms_range"]
    return result


def relative_difference(call: Timed, wanted: Timed) -> float:
    """How far the result of a call is from that of another, ‖a − b‖ / ‖b‖."""
    with torch.no_grad():
        found, reference = call.forward().float(), wanted.forward().float()
    return float((found - reference).norm() / reference.norm())


def time_call(
    function: Callable[[], object], device: torch.device, *, is_graph: bool = False
) -> dict[str, Any]:
    """Median and middle 60 % of a call in milliseconds; only a CUDA graph finds a warm cache."""
    quantiles = [0.5, 0.2, 0.8]
    if device.type != "cuda":
        # Only tests measure on a CPU.
        low, middle, high = sorted(1e3 * x for x in timeit.repeat(function, number=1, repeat=3))
    else:
        # Triton takes long to import.
        from triton.testing import do_bench, do_bench_cudagraph

        torch.cuda.synchronize()
        if is_graph:
            middle, low, high = do_bench_cudagraph(function, rep=50, quantiles=quantiles)
        else:
            middle, low, high = do_bench(function, warmup=50, rep=300, quantiles=quantiles)
    return {"ms": middle, "ms_range": [low, high]}


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
