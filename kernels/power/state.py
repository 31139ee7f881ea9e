"""The state of a sequence, and the floor below which denominators are not trusted."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from longhaul.kernels.shapes import DENOMINATOR_FLOOR, HIGHEST_UNSCALED_DEGREE, SMALLEST_UNIT


class PowerState(NamedTuple):
    """Decayed sums over the past: kv = Σ φ(k_i) v_iᵀ and norm = Σ φ(k_i), float32.

    φ are plain products of key coordinates. Multiplicities and the scale are applied to queries, so
    a state does not depend on them. Both tensors exist whether or not the output is normalised.
    """

    kv: Float[Tensor, "B G P V"]
    norm: Float[Tensor, "B G P"]


def denominator_floor(
    degree: int, query_norm: Tensor, state_norm: Tensor, dtype: torch.dtype
) -> Tensor:
    """Smallest denominator worth dividing by, eq. (16): query_norm is |q|^p, state_norm is ‖n‖.

    For even p the part of the denominator read from the state is a sum of large terms of both
    signs, which in exact arithmetic lies between 0 and |q|^p ‖n‖. Below a few roundings of that
    bound it is rounding noise, and noise divided by noise can have any size.
    """
    if degree % 2:
        return torch.full_like(query_norm, DENOMINATOR_FLOOR)
    return (4 * torch.finfo(dtype).eps * query_norm * state_norm).clamp_(min=DENOMINATOR_FLOOR)


def scales_rows(degree: int, normalize: bool) -> bool:
    """Whether each query's scores are divided by a unit, which cancels in its mean, eq. (17)."""
    return normalize and degree > HIGHEST_UNSCALED_DEGREE


def unit_above(size: Tensor) -> Tensor:
    """The smallest power of two > size, at least 2^−100; 1 for 0. Dividing by it is exact."""
    unit = torch.ldexp(torch.ones_like(size), torch.frexp(size.detach()).exponent)
    return unit.clamp_(min=SMALLEST_UNIT)


def state_size(norm: Tensor, multiplicity: Tensor) -> Tensor:
    """‖n‖ of states (…, P), whose squares might leave the range of float32, as (…, 1)."""
    unit = unit_above(norm.abs().amax(dim=-1, keepdim=True))
    squares = (norm / unit).square_().mul_(multiplicity)
    return unit * squares.sum(dim=-1, keepdim=True).sqrt()


def query_unit(q: Tensor, dim: int) -> Tensor:
    """The unit of rows that read a state: above |q|, since a state has no maximum to take."""
    return unit_above(torch.linalg.vector_norm(q.detach(), dim=dim, keepdim=True))
