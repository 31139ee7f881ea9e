"""The speed of power attention, compared with fused softmax attention and a matrix product."""

from __future__ import annotations

import time

import torch

from longhaul.kernels.backend import own_backend
from longhaul.kernels.power.cost import Form, choose_chunk_size, choose_form, power_flops
from longhaul.kernels.power.verify.peers import Shape, training_call
from longhaul.kernels.verify.timing import Timed
from longhaul.pipeline.system.compile_caches import use_private_caches

_TOKENS = (4096, 8192, 16384, 65536)
_TOKENS_OF_FORMS = (512, 1024, 2048, 4096, 8192, 16384)
_HEADS, _WIDTH, _DEGREE = 4, 64, 2
_SECONDS_PER_ROW = 2.0
_SQUARE = 2048


def run() -> None:
    """Print the tables, measured on the GPU if there is one."""
    use_private_caches()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(
        f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__}. "
        f"B1 H{_HEADS} K{_WIDTH} V{_WIDTH} {_dtype(device)}, degree {_DEGREE}, gated, normalised. "
        "Best of several interleaved rounds. 'of matmul': useful FLOPs per second (4 P V + "
        "(C + 1) (K + V) FLOPs per token and head, P = 2,080), divided by those of a "
        f"{_SQUARE:,} x {_SQUARE:,} matrix product in the same row's rounds."
    )
    print_row("tokens", "pass", "sdpa ms", "chunked ms", "ratio", "of matmul")
    ratios = {}
    for T in _TOKENS:
        for with_backward in (False, True):
            ratios[T, with_backward] = _beside_softmax(T, with_backward, device)
    for with_backward, passes in ((False, "forward"), (True, "forward + backward")):
        faster = [T for T in _TOKENS if ratios[T, with_backward] >= 1]
        crossover = f"from {min(faster):,} tokens on" if faster else "nowhere"
        print(f"{passes}: chunked is faster than sdpa {crossover}")
    _compare_forms(device)


def _compare_forms(device: torch.device) -> None:
    """From which length the chunked form is faster: as measured, and by the cost model."""
    print("forward + backward of both forms:")
    print_row("tokens", "attention ms", "chunked ms")
    measured, predicted = [], []
    for T in _TOKENS_OF_FORMS:
        calls = {
            "attention": training_call("longhaul", _shape(T, device, "attention"), device),
            "chunked": training_call("longhaul", _shape(T, device), device),
        }
        best = best_seconds(calls, True, device)
        print_row(f"{T:,}", *(f"{1e3 * seconds:,.1f}" for seconds in best.values()))
        if best["chunked"] <= best["attention"]:
            measured.append(T)
        if choose_form(T, _WIDTH, _WIDTH, _DEGREE, own_backend(device)) == "chunked":
            predicted.append(T)
    print(
        f"chunked is faster from {min(measured, default=None)} tokens on as measured, from "
        f'{min(predicted, default=None)} on by the cost model of form="auto"'
    )


def _beside_softmax(T: int, with_backward: bool, device: torch.device) -> float:
    """Print one row; return how many times as fast as softmax attention it is."""
    square = torch.randn(_SQUARE, _SQUARE, device=device, dtype=_dtype(device))
    calls = {
        "matmul": Timed(lambda: square @ square, []),
        # Softmax gets its heads-first layout for free: the copy is not part of its time.
        "sdpa": training_call("sdpa", _shape(T, device), device),
        "chunked": training_call("longhaul", _shape(T, device), device),
    }
    best = best_seconds(calls, with_backward, device)
    C = choose_chunk_size(T, _WIDTH, _WIDTH, _DEGREE, own_backend(device))
    flops = _HEADS * power_flops(T, _WIDTH, _WIDTH, _DEGREE, "chunked", C)
    rate = flops / best["chunked"] / (2 * _SQUARE**3 / best["matmul"])
    ratio = best["sdpa"] / best["chunked"]
    print_row(
        f"{T:,}",
        "fwd + bwd" if with_backward else "fwd",
        f"{1e3 * best['sdpa']:,.1f}",
        f"{1e3 * best['chunked']:,.1f}",
        f"{ratio:.2f}",
        "" if with_backward else f"{rate:.0%}",
    )
    return ratio


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _shape(T: int, device: torch.device, form: Form = "chunked") -> Shape:
    return Shape(T=T, H=_HEADS, K=_WIDTH, degree=_DEGREE, form=form, dtype=_dtype(device))


def best_seconds(
    calls: dict[str, Timed], with_backward: bool, device: torch.device
) -> dict[str, float]:
    """The least seconds of each call. Calls take turns, so that a noisy minute affects all."""
    best: dict[str, float] = {}
    gradients = {name: torch.ones_like(call.forward()) for name, call in calls.items()}
    started = time.perf_counter()
    rounds = 0
    while rounds < 2 or time.perf_counter() - started < _SECONDS_PER_ROW:
        rounds += 1
        for name, call in calls.items():
            before = time.perf_counter()
            with torch.set_grad_enabled(with_backward):
                out = call.forward()
            if with_backward and call.leaves:
                torch.autograd.grad(out, call.leaves, gradients[name])
            if device.type == "cuda":
                torch.cuda.synchronize()
            took = time.perf_counter() - before
            best[name] = min(best.get(name, took), took)
    return best


def print_row(*cells: str) -> None:
    print("  ".join(f"{cell:>12}" for cell in cells), flush=True)
