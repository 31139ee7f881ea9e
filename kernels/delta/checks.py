"""Checks of the public functions' arguments; every error names the argument."""

from __future__ import annotations

import torch
from torch import Tensor

from longhaul.kernels.common.arguments import check_layout


def check_tensors(q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, g: Tensor | None) -> None:
    check_layout(q=q, k=k, v=v)
    B, T, G, K = k.shape
    H = v.shape[2]
    if q.shape != k.shape:
        raise ValueError(f"q: found shape {tuple(q.shape)}, wanted {(B, T, G, K)} to match k")
    check_values(k, v)
    if beta is not None:
        _check_tensor("beta", beta)
        if beta.shape != (B, T, H):
            raise ValueError(
                f"beta: found shape {tuple(beta.shape)}, wanted {(B, T, H)} to match v"
            )
        if not beta.is_floating_point():
            raise ValueError(f"beta: found {beta.dtype}, wanted a floating-point dtype")
    if g is not None:
        _check_tensor("log_g", g)
        if g.shape not in ((B, T, H), (B, T, H, K)):
            raise ValueError(
                f"log_g: found shape {tuple(g.shape)}, wanted {(B, T, H)}, or {(B, T, H, K)} for a "
                "decay of each key channel"
            )
        if g.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"log_g: found {g.dtype}, wanted float32, also under autocast: 16 bits lose slow "
                "decays"
            )


def check_values(k: Tensor, v: Tensor) -> None:
    B, T, G, _ = k.shape
    H = v.shape[2]
    if v.shape[:2] != (B, T):
        raise ValueError(f"v: found shape {tuple(v.shape)}, wanted ({B}, {T}, H, V) to match k")
    if H % G:
        raise ValueError(f"k: found {G} heads, wanted a divisor of the {H} heads of v")


def check_state(name: str, state: Tensor, S: int, H: int, K: int, V: int) -> None:
    _check_tensor(name, state)
    if state.shape != (S, H, K, V):
        raise ValueError(f"{name}: found shape {tuple(state.shape)}, wanted {(S, H, K, V)}")
    if not state.is_floating_point():
        raise ValueError(f"{name}: found {state.dtype}, wanted a floating-point dtype")


def _check_tensor(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(f"{name}: found {type(x).__name__}, wanted a tensor")
