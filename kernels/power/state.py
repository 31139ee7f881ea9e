"""The state of a sequence, and the floor below which denominators are not trusted."""

from __future__ import annotations

from itertools import combinations_with_replacement
from math import comb
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from longhaul.kernels.power.reference import layout
from longhaul.kernels.shapes import DENOMINATOR_FLOOR, HIGHEST_UNSCALED_DEGREE, SMALLEST_UNIT


class PowerState(NamedTuple):
    """Decayed sums over the past: kv = Σ φ(k_i) v_iᵀ and norm = Σ φ(k_i), float32.

    kv may be bfloat16 (`to_bfloat16`): steps then keep it so, and other calls return float32.

    φ are plain products of key coordinates. Multiplicities and the scale are applied to queries, so
    a state does not depend on them. Both tensors exist whether or not the output is normalised.
    """

    kv: Float[Tensor, "B G P V"]
    norm: Float[Tensor, "B G P"]

    def to_bfloat16(self) -> PowerState:
        """A copy with kv in bfloat16, which steps then keep. It has no gradient.

        On a GPU a step then moves half the bytes; in torch kv is float32 while a step takes place.
        """
        norm = self.norm.detach()
        norm = norm.to(torch.promote_types(norm.dtype, torch.float32), copy=True)
        return PowerState(round_kv(self.kv.float(), norm), norm)

    def from_tiles_of_4(self, K: int) -> PowerState:
        """Convert a state of degree 4, a sum of φ(k) vᵀ, that was saved in tiles of 4.

        Raises:
            ValueError: if it has not as many rows as such a state of key width K.
        """
        if self.kv.shape[2] != rows_in_tiles_of_4(K):
            raise ValueError(
                f"kv: found {self.kv.shape[2]} rows, wanted {rows_in_tiles_of_4(K)}, those of a "
                f"state of degree 4 with K = {K} in tiles of 4"
            )
        first_row = {
            tiles: 256 * n
            for n, tiles in enumerate(combinations_with_replacement(range(-(-K // 4)), 4))
        }
        coordinates, _ = layout(K, 4)
        rows = [
            first_row[tuple(x // 4 for x in feature)]
            + sum(x % 4 * 4**r for r, x in enumerate(feature))
            for feature in coordinates.tolist()
        ]
        return PowerState(self.kv[:, :, rows], self.norm[:, :, rows])


def rows_in_tiles_of_4(K: int) -> int:
    """Rows of a state of degree 4 as it was stored until tiles were 2 wide."""
    return 256 * comb(-(-K // 4) + 3, 4)


# So that torch.load reads a saved state without weights_only=False, which runs any code.
torch.serialization.add_safe_globals([PowerState])

# Multipliers of the hash in `round_kv`, odd 32-bit numbers without a pattern in their bits.
HASH_MULTIPLIERS = (0x9E3779B1, 0x85EBCA6B, 0x2C1B3C6D)


@torch.no_grad()
def round_kv(kv: Float[Tensor, "B G P V"], norm: Float[Tensor, "B G P"]) -> Tensor:
    """kv from float32 to bfloat16, up or down at random, so that its mean over many steps is right.

    Rounding to nearest would lose every addition below 1/512 of a sum, and every decay nearer to 1
    than that. The random bits are a hash of the column and of the bits of the feature's norm, which
    change as long as tokens change the norm: equal calls have equal results, and there is no seed.
    """
    by_norm, by_column, final = (_as_int32(x) for x in HASH_MULTIPLIERS)
    columns = torch.arange(kv.shape[-1], dtype=torch.int32, device=kv.device)
    mixed = norm.float().view(torch.int32)[..., None] * by_norm + columns * by_column
    # Right shifts of signed numbers repeat the sign, so its copies are masked.
    mixed = (mixed ^ ((mixed >> 15) & 0x1FFFF)) * final
    noise = (mixed >> 16) & 0xFFFF
    rounded = ((kv.view(torch.int32) + noise) & ~0xFFFF).view(torch.float32)
    return torch.where(kv.isfinite(), rounded, kv).bfloat16()


def _as_int32(x: int) -> int:
    """The signed number with the same 32 bits."""
    return x - (1 << 32) if x >= 1 << 31 else x


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
