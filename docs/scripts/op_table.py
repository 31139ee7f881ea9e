"""Time power attention at several degrees, widths and dtypes beside SDPA and plain torch.

    python -P docs/scripts/op_table.py [TOKENS]

Plain torch is the chunked form as one writes it down: monomials of queries and keys, a loop over
chunks, autograd. Each call is made once before it is timed; then all take turns for five rounds, of
which the medians are printed in milliseconds. The table is in docs/kernels.md.
"""

import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from itertools import combinations_with_replacement
from math import factorial, prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, scaled_dot_product_attention

from longhaul.kernels import power_attention

CHUNK = 128
ROUNDS = 5


class Shape(NamedTuple):
    degree: int
    H: int
    K: int
    V: int
    dtype: torch.dtype = torch.float32


SHAPES = (
    Shape(1, 4, 64, 64), Shape(2, 4, 32, 32), Shape(2, 4, 64, 64), Shape(2, 2, 128, 128),
    Shape(4, 4, 16, 64), Shape(2, 4, 64, 64, torch.bfloat16),
)  # fmt: skip


def plain(q: Tensor, k: Tensor, v: Tensor, log_g: Tensor, degree: int) -> Tensor:
    """The normalised, gated chunked form. q, k, v are (B, H, T, width), log_g (B, H, T)."""
    monomials = list(combinations_with_replacement(range(q.shape[-1]), degree))
    places = torch.tensor(monomials)  # (P, degree)
    orders = [factorial(degree) // prod(map(factorial, Counter(one).values())) for one in monomials]
    orderings = torch.tensor(orders, dtype=q.dtype)
    q = q * q.shape[-1] ** -0.5
    v = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)
    state = q.new_zeros(*q.shape[:2], len(monomials), v.shape[-1])
    is_past = torch.ones(CHUNK, CHUNK, dtype=torch.bool).tril()
    outputs = []
    for qc, kc, vc, gc in zip(*(x.split(CHUNK, dim=2) for x in (q, k, v, log_g)), strict=True):
        decay = gc.cumsum(dim=2)
        pair = decay[..., :, None] - decay[..., None, :]
        pair = pair.masked_fill(~is_past[: pair.shape[2], : pair.shape[3]], -torch.inf)
        weights = (qc @ kc.mT) ** degree * pair.exp().to(q.dtype)
        read = qc[..., places].prod(dim=-1) * orderings
        found = weights @ vc + decay.exp()[..., None].to(q.dtype) * (read @ state)
        outputs.append(found[..., :-1] / found[..., -1:])
        to_end = (decay[..., -1:] - decay).exp()[..., None].to(q.dtype)
        written = kc[..., places].prod(dim=-1)
        state = decay[..., -1, None, None].exp().to(q.dtype) * state + written.mT @ (to_end * vc)
    return torch.cat(outputs, dim=2)


def calls_of(shape: Shape, T: int) -> dict[str, tuple[Callable[[], Tensor], list[Tensor]]]:
    """What is timed, each on inputs in its own layout."""
    degree, H, K, V, dtype = shape
    torch.manual_seed(0)
    inputs = [torch.randn(1, T, H, width) for width in (K, K, V)]
    log_g = logsigmoid(torch.randn(1, T, H) + 5)
    own = [x.to(dtype).requires_grad_() for x in inputs]
    heads_first = [x.to(dtype).transpose(1, 2).contiguous().requires_grad_() for x in inputs]
    gates = log_g.transpose(1, 2).contiguous()
    return {
        "longhaul": (lambda: power_attention(*own, log_g, degree=degree, form="chunked")[0], own),
        "plain torch": (lambda: plain(*heads_first, gates, degree), heads_first),
        "sdpa": (lambda: scaled_dot_product_attention(*heads_first, is_causal=True), heads_first),
    }


def milliseconds(call: Callable[[], Tensor], leaves: list[Tensor]) -> tuple[float, float]:
    """Of a forward pass, and of it with a backward pass."""
    began = time.perf_counter()
    out = call()
    forward = time.perf_counter() - began
    torch.autograd.grad(out.sum(), leaves)
    return 1e3 * forward, 1e3 * (time.perf_counter() - began)


def main(tokens: str = "8192") -> None:
    print("| degree | H, K, V | dtype | | longhaul | plain torch | SDPA |")
    print("|---|---|---|---|---:|---:|---:|")
    for shape in SHAPES:
        calls = calls_of(shape, int(tokens))
        for call in calls.values():
            milliseconds(*call)
        rounds = [
            {name: milliseconds(*call) for name, call in calls.items()} for _ in range(ROUNDS)
        ]
        for n, passes in enumerate(("forward", "forward + backward")):
            cells = [f"{statistics.median(one[name][n] for one in rounds):,.0f}" for name in calls]
            name = f"{shape.degree} | {shape.H}, {shape.K}, {shape.V} | {str(shape.dtype)[6:]}"
            print(f"| {name} | {passes} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
