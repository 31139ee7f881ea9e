"""Rotary phases that stay right over a million tokens, and the rotation itself."""

import math

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor


def frequencies(width: int, longest_document: int, device: torch.device) -> Float64[Tensor, "J"]:
    """Turns per token of each of the width / 2 pairs: N^(-2 (j - 1) / width), j = 1, 2, ...

    The symmetric-power papers write it as an angle, theta_j = 2 pi / N^(2 (j - 1) / width).
    """
    pairs = torch.arange(width // 2, dtype=torch.float64, device=device)
    return float(longest_document) ** (-2 * pairs / width)


def frequencies_from_base(width: int, base: float, device: torch.device) -> Float64[Tensor, "J"]:
    """Turns per token of the usual rotary embedding, theta_j = base^(-2 (j - 1) / width)."""
    pairs = torch.arange(width // 2, dtype=torch.float64, device=device)
    return base ** (-2 * pairs / width) / (2 * math.pi)


def accumulate(
    rates: Float[Tensor, "B T"],
    start: Float64[Tensor, "B"] | None = None,
    cu_seqlens: Int[Tensor, "documents_plus_1"] | None = None,
) -> Float64[Tensor, "B T"]:
    """Rotation mu_t = mu_(t-1) + beta_t, in tokens, beginning anew at each packed document.

    A float32 sum is off by 0.2 rad after a million tokens, and bf16 by whole turns; float64 holds
    the phase to 1e-9 turns, and there is one number per token here, not one per pair.
    """
    rotation = rates.to(torch.float64).cumsum(dim=1)  # (B, T)
    if cu_seqlens is not None:
        starts = cu_seqlens[:-1].to(torch.int64)
        lengths = cu_seqlens.to(torch.int64).diff()
        before = torch.cat([rotation.new_zeros(1, 1), rotation], dim=1)[:, starts]
        rotation = rotation - before.repeat_interleave(lengths, dim=1)
    return rotation if start is None else rotation + start[:, None]


def phases(
    rotation: Float64[Tensor, "B T"], turns_per_token: Float64[Tensor, "J"], dtype: torch.dtype
) -> tuple[Float[Tensor, "B T 1 J"], Float[Tensor, "B T 1 J"]]:
    """Cosine and sine of 2 pi mu_t f_j; whole turns are dropped while still in float64."""
    turns = rotation[:, :, None, None] * turns_per_token  # (B, T, 1, J)
    angle = (2 * math.pi) * (turns - turns.detach().floor()).to(dtype)
    return angle.cos(), angle.sin()


def rotate(
    x: Float[Tensor, "B T H K"], cos: Float[Tensor, "B T 1 J"], sin: Float[Tensor, "B T 1 J"]
) -> Float[Tensor, "B T H K"]:
    """Turn each pair (x_j, x_(j + K/2)) by its phase; computed in the dtype of the phases."""
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)
    return turned.to(x.dtype)
