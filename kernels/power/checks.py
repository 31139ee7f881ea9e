"""Checks of the public functions' arguments; every error names the argument."""

from __future__ import annotations

from math import inf
from numbers import Integral, Real

import torch
from torch import Tensor

from longhaul.kernels.power.state import PowerState
from longhaul.kernels.shapes import state_features

_LONGEST_CHUNK = 2**31 - 1  # compiled kernels count tokens in 32 bits
_INPUT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_tensors(q: Tensor, k: Tensor, v: Tensor, log_g: Tensor | None) -> None:
    _check_layout(q=q, k=k, v=v)
    B, T, H, K = q.shape
    G = k.shape[2]
    if k.shape != (B, T, G, K):
        raise ValueError(f"k: found shape {tuple(k.shape)}, wanted {(B, T, G, K)} to match q")
    if H % G:
        raise ValueError(f"k: found {G} heads, wanted a divisor of the {H} heads of q")
    _check_like_keys(k, v, log_g)


def check_keys(k: Tensor, v: Tensor, log_g: Tensor | None) -> None:
    """As `check_tensors`, for a call without queries."""
    _check_layout(k=k, v=v)
    _check_like_keys(k, v, log_g)


def check_chunk_size(chunk_size: int | None) -> None:
    # Where the compiler treats it as a symbol, it is no int.
    is_whole = isinstance(chunk_size, (Integral, torch.SymInt)) and not isinstance(chunk_size, bool)
    if chunk_size is not None and not (is_whole and 1 <= chunk_size <= _LONGEST_CHUNK):
        raise ValueError(
            f"chunk_size: found {chunk_size!r}, wanted a whole number from 1 to {_LONGEST_CHUNK}"
        )


def check_flags(**flags: bool) -> None:
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise ValueError(f"{name}: found {flag!r}, wanted True or False")


def check_scale(scale: float | None) -> None:
    is_number = isinstance(scale, (Real, torch.SymFloat)) and not isinstance(scale, bool)
    if scale is not None and not (is_number and abs(scale) < inf):
        raise ValueError(f"scale: found {scale!r}, wanted a finite number")


def _check_layout(**tensors: Tensor) -> None:
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise ValueError(f"{name}: found {type(x).__name__}, wanted a tensor")
        if x.ndim != 4 or 0 in x.shape:
            raise ValueError(
                f"{name}: found shape {tuple(x.shape)}, wanted (B, T, heads, width), "
                "each at least 1"
            )
    wanted, names = next(iter(tensors.values())).dtype, list(tensors)
    for name, x in tensors.items():
        if x.dtype != wanted or x.dtype not in _INPUT_DTYPES:
            every = f"{', '.join(names[:-1])} and {names[-1]}"
            raise ValueError(
                f"{name}: found {x.dtype}, wanted one floating-point dtype for {every}"
            )


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
            raise ValueError(f"state.{name}: found shape {tuple(x.shape)}, wanted {shape}")
        if not x.is_floating_point():
            raise ValueError(f"state.{name}: found {x.dtype}, wanted a floating-point dtype")
