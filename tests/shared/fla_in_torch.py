"""Plain torch in place of flash-linear-attention's kernels.

The functions have the arguments, layouts and results that its documentation describes.
"""

import sys
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from longhaul.kernels.delta import fla


def documented(
    q: Tensor,  # [B, T, H, K]
    k: Tensor,  # [B, T, H, K]
    v: Tensor,  # [B, T, HV, V]
    g: Tensor | None,  # [B, T, HV] or [B, T, HV, K], logs
    beta: Tensor | None,  # [B, T, HV]
    scale: float | None = None,
    initial_state: Tensor | None = None,  # [N, HV, K, V]
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,  # [N+1], of a batch of one
) -> tuple[Tensor, Tensor | None]:
    assert g is None or g.isfinite().all(), "differences of its sums would be NaN"
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    HV = v.shape[2]
    rows = [(b, 0, q.shape[1]) for b in range(len(q))]
    if cu_seqlens is not None:
        assert len(q) == 1
        assert cu_seqlens.dtype == torch.int64
        rows = [(0, start, end) for start, end in pairwise(cu_seqlens.tolist())]
    out, states = torch.zeros_like(v), []
    for n, (b, start, end) in enumerate(rows):
        for h in range(HV):
            of_keys = h // (HV // q.shape[2])
            S = v.new_zeros(q.shape[3], v.shape[3])
            if initial_state is not None:
                S = initial_state[n, h]
            for t in range(start, end):
                key, new = k[b, t, of_keys], v[b, t, h]
                if g is not None:
                    S = g[b, t, h].exp().reshape(-1, 1) * S
                if beta is not None:
                    new = beta[b, t, h] * (new - key @ S)
                S = S + torch.outer(key, new)
                out[b, t, h] = scale * q[b, t, of_keys] @ S
            states.append(S)
    final = torch.stack(states).view(len(rows), HV, *states[0].shape)
    return out, final if output_final_state else None


def same_heads(q: Tensor, v: Tensor) -> None:
    assert q.shape[2] == v.shape[2], "no grouped values"


def chunk_delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, **how: Any) -> Any:
    same_heads(q, v)
    return documented(q, k, v, None, beta, **how)


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **how: Any
) -> Any:
    assert g.ndim == 3
    return documented(q, k, v, g, beta, **how)


def chunk_kda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **how: Any) -> Any:
    assert g.ndim == 4
    return documented(q, k, v, g, beta, **how)


def chunk_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, **how: Any) -> Any:
    same_heads(q, v)
    assert g.ndim == 4
    return documented(q, k, v, g, None, **how)


def chunk_simple_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, **how: Any) -> Any:
    same_heads(q, v)
    assert g is None or g.ndim == 3
    return documented(q, k, v, g, None, **how)


def install(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Put the functions in place of the package, on a CPU and in float64.

    Returns:
        The names of those that will have been called.
    """
    called: list[str] = []
    functions = (chunk_delta_rule, chunk_gated_delta_rule, chunk_kda, chunk_gla, chunk_simple_gla)
    for function in functions:
        name = function.__name__.removeprefix("chunk_")
        module = ModuleType(f"fla.ops.{name}")

        def run(*args: Any, function: Any = function, **how: Any) -> Any:
            called.append(function.__name__.removeprefix("chunk_"))
            return function(*args, **how)

        setattr(module, f"chunk_{name}", run)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(fla, "why_unavailable", lambda _: None)
    monkeypatch.setattr(fla, "_DTYPES", (torch.float64,))
    return called
