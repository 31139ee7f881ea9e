"""The state of a sequence, and the floor below which denominators are not trusted."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from longhaul.kernels.shapes import DENOMINATOR_FLOOR


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
