"""The delta rule against the same chunks in plain torch with autograd: time and peak memory."""

from __future__ import annotations

import ctypes
import gc
from concurrent.futures import ProcessPoolExecutor
from math import inf
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from longhaul.kernels import delta_rule
from longhaul.kernels.delta.cost import choose_chunk_size
from longhaul.kernels.verify.timing import Timed
from longhaul.pipeline.benchmarks.kernels import best_seconds, print_row

_TOKENS, _HEADS, _WIDTH = 4096, 4, 64
_PLAIN = {f"plain, chunk {C}": C for C in (32, 64, 128)}
"""The chunk sizes of the plain calls, in tokens, by their names."""
_CALLS = ("delta_rule", "gates a channel", *_PLAIN)


def run() -> None:
    """Print the table, measured on the GPU if there is one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(
        f"Forward and backward of the delta rule on {device.type}, {torch.get_num_threads()} "
        f"threads, torch {torch.__version__}: B1 T{_TOKENS} H{_HEADS} K{_WIDTH} V{_WIDTH} float32, "
        f"a gate a head, chunks of {choose_chunk_size(_TOKENS)} tokens. Plain: matrix products, "
        "torch.linalg.solve_triangular and autograd. Best of several rounds, which take turns; "
        "peak memory of a process of its own, above that before. Ratios: to the best plain."
    )
    best = best_seconds({name: call(name, _TOKENS, device) for name in _CALLS}, True, device)
    peaks = {name: _peak(name, device) for name in _CALLS}
    plain_time, plain_peak = (min(of[name] for name in _PLAIN) for of in (best, peaks))
    print_row("ms", "ratio", "peak MB", "ratio", "call")
    for name in _CALLS:
        print_row(
            f"{1e3 * best[name]:,.1f}",
            f"{best[name] / plain_time:.2f}",
            f"{peaks[name] / 1e6:,.1f}",
            f"{peaks[name] / plain_peak:.2f}",
            name,
        )


def call(name: str, T: int, device: torch.device) -> Timed:
    """One forward pass, ready for a backward pass."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (1, T, _HEADS, _WIDTH)
    q, k, v, gates = (torch.randn(shape, generator=generator, device=device) for _ in range(4))
    log_g = F.logsigmoid(gates + 4)
    log_g = log_g if name == "gates a channel" else log_g[..., 0].contiguous()
    beta = torch.rand(shape[:3], generator=generator, device=device)
    leaves = [x.requires_grad_() for x in (q, F.normalize(k, dim=-1), v, beta, log_g)]
    if name in _PLAIN:
        return Timed(lambda: plain(*leaves, chunk_size=_PLAIN[name]), leaves)
    return Timed(lambda: delta_rule(*leaves)[0], leaves)


def plain(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_g: Tensor, *, chunk_size: int
) -> Tensor:
    """`delta_rule` with gates of heads, for whole chunks, as one would write it in torch."""
    (B, T, H, K), V, C = q.shape, v.shape[3], chunk_size
    q, k, v, beta, log_g = (
        x.reshape(B, T // C, C, H, -1).transpose(2, 3) for x in (q, k, v, beta, log_g)
    )  # (B, N, H, C, ...)
    sums = log_g.cumsum(dim=-2)
    later = torch.ones(C, C, dtype=torch.bool, device=q.device).triu(1)
    decay = (sums - sums.mT).masked_fill(later, -inf).exp()  # (B, N, H, C, C)
    q = q * K**-0.5
    system = beta * decay * (k @ k.mT)
    written = torch.cat([beta * v, beta * sums.exp() * k], dim=-1)
    # The entries on the diagonal are taken to be 1, and those above it are not read.
    solved = torch.linalg.solve_triangular(system, written, upper=False, unitriangular=True)
    u, w = solved.split([V, K], dim=-1)
    scores, q_start = decay * (q @ k.mT), sums.exp() * q
    last = sums[..., -1:, :]
    k_end, total = (last - sums).exp() * k, last.exp()
    state = v.new_zeros(B, H, K, V)
    outputs = []
    for n in range(T // C):
        new = u[:, n] - w[:, n] @ state
        outputs.append(q_start[:, n] @ state + scores[:, n] @ new)
        state = total[:, n] * state + k_end[:, n].mT @ new
    return torch.stack(outputs, dim=1).transpose(2, 3).reshape(B, T, H, V)


def _peak(name: str, device: torch.device) -> float:
    """Bytes that forward and backward hold at most, beside inputs and the gradient given."""
    if device.type == "cuda":
        return _bytes_of(name, device)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(_bytes_of, name, device).result()


def _bytes_of(name: str, device: torch.device) -> float:
    # Libraries are loaded, and threads started, by a short call.
    for T in (128, _TOKENS):
        timed = call(name, T, device)
        gradient = torch.ones(1, T, _HEADS, _WIDTH, device=device)
        gc.collect()
        before = _begin(device)
        torch.autograd.grad(timed.forward(), timed.leaves, gradient)
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated() - before)
    return float(_resident("VmHWM") - before)


def _begin(device: torch.device) -> int:
    """Bytes in use, from where the peak is counted anew."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _resident("VmRSS")


def _resident(name: str) -> int:
    """Bytes of this process by Linux's name of them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (found,) = (line.split()[1] for line in lines if line.startswith(f"{name}:"))
    return 1024 * int(found)
