"""Speed of power attention beside the fused softmax attention and a large matrix product."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, scaled_dot_product_attention

from longhaul.kernels import power_attention
from longhaul.kernels.power.cost import choose_chunk_size, choose_form, power_flops

_TOKENS = (4096, 8192, 16384, 65536)
_LONGEST_ATTENTION_FORM = 8192
_HEADS, _WIDTH, _DEGREE = 4, 64, 2
_SECONDS_PER_ROW = 2.0


def run() -> None:
    """Print the table."""
    print(
        f"B1 H{_HEADS} K{_WIDTH} V{_WIDTH} float32, degree {_DEGREE}, gated, normalised; "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}. Best of several rounds, "
        "taken in turns. 'of matmul' is useful FLOPs (4 P V + 2 C (K + V) a token and head, "
        "P = 2,080) a second over those of a 2,048 x 2,048 product in the same row's rounds."
    )
    columns = ("tokens", "pass", "sdpa ms", "chunked ms", "ratio", "of matmul", "attention ms")
    print("  ".join(f"{column:>12}" for column in columns), flush=True)
    ratios = {}
    for T in _TOKENS:
        for with_backward in (False, True):
            ratios[T, with_backward] = _row(T, with_backward)
    for with_backward, name in ((False, "forward"), (True, "forward + backward")):
        faster = [T for T in _TOKENS if ratios[T, with_backward] >= 1]
        crossover = f"from {min(faster):,} tokens on" if faster else "nowhere"
        print(f"{name}: chunked is faster than sdpa {crossover}")
    lengths = [2**n for n in range(6, 17)]
    chosen = [T for T in lengths if choose_form(T, _WIDTH, _WIDTH, _DEGREE) == "chunked"]
    print(f'form="auto" leaves the attention form at {min(chosen)} tokens')


def _row(T: int, with_backward: bool) -> float:
    shape = (1, T, _HEADS, _WIDTH)
    q, k, v = (torch.randn(shape, requires_grad=with_backward) for _ in range(3))
    log_g = logsigmoid(torch.randn(shape[:3]) + 4).requires_grad_(with_backward)
    # Softmax gets its heads-first layout for free: the copy is not part of its time.
    q_heads, k_heads, v_heads = (
        x.detach().transpose(1, 2).contiguous().requires_grad_(with_backward) for x in (q, k, v)
    )
    square = torch.randn(2048, 2048)

    def power(form: str) -> Callable[[], Tensor]:
        return lambda: power_attention(q, k, v, log_g, degree=_DEGREE, form=form)[0]  # type: ignore[arg-type]

    calls: dict[str, Callable[[], Tensor]] = {
        "matmul": lambda: square @ square,
        "sdpa": lambda: scaled_dot_product_attention(q_heads, k_heads, v_heads, is_causal=True),
        "chunked": power("chunked"),
    }
    if T <= _LONGEST_ATTENTION_FORM:
        calls["attention"] = power("attention")
    best = _best_seconds(calls, with_backward)

    C = choose_chunk_size(T, _WIDTH, _WIDTH, _DEGREE)
    flops = _HEADS * power_flops(T, _WIDTH, _WIDTH, _DEGREE, "chunked", C)
    rate = flops / best["chunked"] / (2 * 2048**3 / best["matmul"])
    ratio = best["sdpa"] / best["chunked"]
    cells = (
        f"{T:,}",
        "fwd + bwd" if with_backward else "fwd",
        f"{1e3 * best['sdpa']:,.1f}",
        f"{1e3 * best['chunked']:,.1f}",
        f"{ratio:.2f}",
        "" if with_backward else f"{rate:.0%}",
        f"{1e3 * best['attention']:,.1f}" if "attention" in best else "",
    )
    print("  ".join(f"{cell:>12}" for cell in cells), flush=True)
    return ratio


def _best_seconds(calls: dict[str, Callable[[], Tensor]], with_backward: bool) -> dict[str, float]:
    """Least time of each call; they take turns, so that a noisy minute hits all of them."""
    best: dict[str, float] = {}
    gradient: Tensor | None = None
    started = time.perf_counter()
    rounds = 0
    while rounds < 2 or time.perf_counter() - started < _SECONDS_PER_ROW:
        rounds += 1
        for name, call in calls.items():
            before = time.perf_counter()
            out = call()
            if with_backward and out.requires_grad:
                if gradient is None or gradient.shape != out.shape:
                    gradient = torch.ones_like(out)
                out.backward(gradient)
            took = time.perf_counter() - before
            best[name] = min(best.get(name, took), took)
    return best
