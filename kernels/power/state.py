"""What a sequence leaves behind, and the rule that keeps a small denominator harmless."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from longhaul.kernels.shapes import DENOMINATOR_FLOOR


class PowerState(NamedTuple):
    """Decayed sums over the past: kv = Σ φ(k_i) v_iᵀ and norm = Σ φ(k_i), float32.

    φ are plain products of key coordinates: multiplicities and the scale sit on the query side, so
    a state does not depend on them. Both parts are kept whether or not the output is normalised.
    """

    kv: Float[Tensor, "B G P V"]
    norm: Float[Tensor, "B G P"]


def denominator_floor(
    degree: int, query_norm: Tensor, state_norm: Tensor, dtype: torch.dtype
) -> Tensor:
    """Smallest denominator worth dividing by, eq. (16): query_norm is |q|^p, state_norm is ‖n‖.

    For even p the part read from the state is a sum of large terms of both signs that is never
    negative in exact arithmetic and at most |q|^p ‖n‖. Below a few roundings of that bound its
    digits are noise, and dividing noise by noise would give outputs of any size.
    """
    if degree % 2:
        return torch.full_like(query_norm, DENOMINATOR_FLOOR)
    return (4 * torch.finfo(dtype).eps * query_norm * state_norm).clamp_(min=DENOMINATOR_FLOOR)
