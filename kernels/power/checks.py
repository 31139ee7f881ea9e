"""Checks of the public functions' arguments; every error names the argument."""

from __future__ import annotations

import torch
from torch import Tensor

from longhaul.kernels.common.arguments import check_layout
from longhaul.kernels.power.state import PowerState, rows_in_tiles_of_4
from longhaul.kernels.shapes import state_features


def check_tensors(q: Tensor, k: Tensor, v: Tensor, log_g: Tensor | None) -> None:
    check_layout(q=q, k=k, v=v)
    B, T, H, K = q.shape
    G = k.shape[2]
    if k.shape != (B, T, G, K):
        raise ValueError(f"k: found shape {tuple(k.shape)}, wanted {(B, T, G, K)} to match q")
    if H % G:
        raise ValueError(f"k: found {G} heads, wanted a divisor of the {H} heads of q")
    _check_like_keys(k, v, log_g)


def check_keys(k: Tensor, v: Tensor, log_g: Tensor | None) -> None:
    """As `check_tensors`, for a call without queries."""
    check_layout(k=k, v=v)
    _check_like_keys(k, v, log_g)


def _check_like_keys(k: Tensor, v: Tensor, log_g: Tensor | None) -> None:
    B, T, G = k.shape[:3]
    if v.shape[:3] != (B, T, G):
        raise ValueError(f"v: found shape {tuple(v.shape)}, wanted ({B}, {T}, {G}, V) to match k")
    if log_g is not None and not isinstance(log_g, Tensor):
        raise ValueError(f"log_g: found {type(log_g).__name__}, wanted a tensor")
    if log_g is not None and log_g.shape != (B, T, G):
        raise ValueError(f"log_g: found shape {tuple(log_g.shape)}, wanted {(B, T, G)} to match k")
    if log_g is not None and log_g.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"log_g: found {log_g.dtype}, wanted float32, also under autocast: 16 bits lose slow "
            "decays"
        )


def check_state(state: PowerState, N: int, G: int, K: int, V: int, degree: int) -> None:
    if not isinstance(state, PowerState):
        raise ValueError(f"state: found {type(state).__name__}, wanted a PowerState")
    P = state_features(K, degree)
    for name, x, shape in (("kv", state.kv, (N, G, P, V)), ("norm", state.norm, (N, G, P))):
        if not isinstance(x, Tensor):
            raise ValueError(f"state.{name}: found {type(x).__name__}, wanted a tensor")
        if x.shape != shape:
            is_old = degree == 4 and x.shape[2:3] == (rows_in_tiles_of_4(K),)
            hint = f"; it is in tiles of 4, which from_tiles_of_4({K}) reads" if is_old else ""
            raise ValueError(f"state.{name}: found shape {tuple(x.shape)}, wanted {shape}{hint}")
        if not x.is_floating_point():
            raise ValueError(f"state.{name}: found {x.dtype}, wanted a floating-point dtype")
