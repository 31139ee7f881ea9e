"""Symmetric-power features, transposed (tokens innermost), built one tile row at a time.

The layout is defined in README.md, section 3. The recursion behind it, eq. (8): the features of
degree p whose smallest tile is I are x[tile I] ⊗ (features of degree p − 1 with all tiles ≥ I),
and the latter are a suffix of the list of degree p − 1, because the list is sorted by tiles.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import combinations_with_replacement
from math import comb, factorial, prod

import torch
from jaxtyping import Float
from longhaul.kernels.shapes import padded_width, tile_width
from torch import Tensor

Step = tuple[Tensor, Tensor, Tensor]


@lru_cache(maxsize=64)
def _tile_multiplicity(width: int, degree: int) -> tuple[int, ...]:
    tiles = range(padded_width(width, degree) // tile_width(degree))
    return tuple(
        factorial(degree) // prod(factorial(chosen.count(one)) for one in set(chosen))
        for chosen in combinations_with_replacement(tiles, degree)
    )


def multiplicity(width: int, degree: int, like: Tensor) -> Float[Tensor, " P"]:
    """How many orderings of its tiles a feature stands for, eq. (7)."""
    per_tile = torch.tensor(_tile_multiplicity(width, degree), dtype=like.dtype)
    return per_tile.repeat_interleave(tile_width(degree) ** degree).to(like.device)


def level_sizes(width: int, degree: int) -> list[int]:
    """Number of features of degree 1, 2, … `degree`, all in the tiles of `degree`."""
    tile = tile_width(degree)
    tiles = padded_width(width, degree) // tile
    return [comb(tiles + d - 1, d) * tile**d for d in range(1, degree + 1)]


def expansion_steps(levels: list[Tensor], tile: int) -> list[Step]:
    """Views (lower, tile, out) with out = lower * tile, in order; levels[0] is x, (rows, K, C)."""
    x = levels[0]
    rows, width, tokens = x.shape
    tiles = width // tile
    steps = []
    for d in range(2, len(levels) + 1):
        lower, upper = levels[d - 2], levels[d - 1]
        offset = 0
        for i in range(tiles):
            suffix = comb(tiles - i + d - 2, d - 1) * tile ** (d - 1)
            size = suffix * tile
            steps.append(
                (
                    lower[:, lower.shape[1] - suffix :, None, :],
                    x[:, None, i * tile : (i + 1) * tile, :],
                    upper[:, offset : offset + size].view(rows, suffix, tile, tokens),
                )
            )
            offset += size
    return steps


def expand(x: Float[Tensor, "*rows K"], degree: int) -> Float[Tensor, "*rows P"]:
    """The same features with the width innermost, differentiable: for single tokens."""
    tile = tile_width(degree)
    width = padded_width(x.shape[-1], degree)
    x = torch.nn.functional.pad(x, (0, width - x.shape[-1]))
    tiles = width // tile
    lower = x
    for d in range(2, degree + 1):
        blocks = []
        for i in range(tiles):
            suffix = comb(tiles - i + d - 2, d - 1) * tile ** (d - 1)
            first = x[..., None, i * tile : (i + 1) * tile]
            blocks.append((lower[..., lower.shape[-1] - suffix :, None] * first).flatten(-2))
        lower = torch.cat(blocks, dim=-1)
    return lower
