"""Symmetric-power features, transposed (tokens innermost), built one tile row at a time.

The layout is defined in README.md, section 3. The recursion behind it, eq. (8): the features of
degree p whose smallest tile is I are x[tile I] ⊗ (features of degree p − 1 with all tiles ≥ I),
and the latter are a suffix of the list of degree p − 1, because the list is sorted by tiles.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from itertools import combinations_with_replacement
from math import comb, factorial, prod
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from longhaul.kernels.shapes import padded_width, tile_width


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


def _level_sizes(width: int, degree: int) -> list[int]:
    """Number of features of degree 1, 2, … `degree`, all in the tiles of `degree`."""
    tile = tile_width(degree)
    tiles = padded_width(width, degree) // tile
    return [comb(tiles + d - 1, d) * int(tile**d) for d in range(1, degree + 1)]


class _TileRow(NamedTuple):
    """One step of eq. (8): out = lower ⊗ x[tile], as views that broadcast against each other."""

    lower: Tensor  # (rows, suffix, 1, tokens)
    tile: Tensor  # (rows, 1, tile, tokens)
    out: Tensor  # (rows, suffix, tile, tokens)


class FeatureScratch:
    """Memory for the features of some tokens and for their gradients, made when first used.

    Queries and keys of one block of rows share it: only one φ exists at a time.
    """

    def __init__(self, rows: int, width: int, tokens: int, degree: int, like: Tensor) -> None:
        self.degree, self.tokens = degree, tokens
        self._shapes = [(rows, size, tokens) for size in _level_sizes(width, degree)[1:]]
        self._like = like

    @cached_property
    def levels(self) -> list[Tensor]:
        """Features of degree 2, 3, …: (rows, features, tokens)."""
        return [self._like.new_empty(shape) for shape in self._shapes]

    @cached_property
    def dlevels(self) -> list[Tensor]:
        """Their gradients."""
        return [self._like.new_empty(shape) for shape in self._shapes]

    @cached_property
    def products(self) -> Tensor:
        """Room for the products of a tile row, flat."""
        rows, size, tokens = self._shapes[-1]
        return self._like.new_empty(rows * size * tokens)


class FeatureMap:
    """φ of a buffer x (rows, K, tokens), K padded to whole tiles, and its backward into dx."""

    def __init__(self, x: Tensor, dx: Tensor, scratch: FeatureScratch) -> None:
        self._x, self._dx, self._scratch = x, dx, scratch

    def _tile_rows(self, x: Tensor, levels: list[Tensor]) -> list[list[_TileRow]]:
        """The steps of every level from degree 2 on, with the levels cut to the tokens of x."""
        _, width, tokens = x.shape
        tile = tile_width(self._scratch.degree)
        steps: list[list[_TileRow]] = []
        lower = x
        for d, level in enumerate(levels, start=2):
            upper = level[:, :, :tokens]
            offset = 0
            steps.append([])
            for start in range(0, width, tile):
                suffix = comb((width - start) // tile + d - 2, d - 1) * int(tile ** (d - 1))
                out = upper[:, offset : offset + suffix * tile]
                out = out.view(len(x), suffix, tile, tokens)
                own = x[:, None, start : start + tile]
                steps[-1].append(_TileRow(lower[:, -suffix:, None], own, out))
                offset += suffix * tile
            lower = upper
        return steps

    @cached_property
    def _forward_rows(self) -> list[list[_TileRow]]:
        return self._tile_rows(self._x, self._scratch.levels)

    @cached_property
    def _backward_rows(self) -> list[list[_TileRow]]:
        return self._tile_rows(self._dx, self._scratch.dlevels)

    @staticmethod
    def _build(levels: list[list[_TileRow]]) -> None:
        for level in levels:
            for lower, tile, out in level:
                torch.mul(lower, tile, out=out)

    def features(self) -> Tensor:
        """φ(x), (rows, P, tokens), in the shared buffer."""
        if self._scratch.degree == 1:
            return self._x
        self._build(self._forward_rows)
        return self._scratch.levels[-1][:, :, : self._x.shape[2]]

    def dfeatures(self) -> Tensor:
        """Where the caller writes the gradient of φ(x) before it calls `contract`."""
        if self._scratch.degree == 1:
            return self._dx
        return self._scratch.dlevels[-1][:, :, : self._x.shape[2]]

    def contract(self) -> None:
        """Write into dx what `dfeatures` holds, by the product rule on eq. (8), top level first."""
        if self._scratch.degree == 1:
            return
        self._build(self._forward_rows[:-1])
        self._dx.zero_()
        for lower_gradient in self._scratch.dlevels[:-1]:
            lower_gradient.zero_()
        for level, dlevel in zip(
            reversed(self._forward_rows), reversed(self._backward_rows), strict=True
        ):
            for (lower, tile, _), (dlower, dtile, dout) in zip(level, dlevel, strict=True):
                product = self._scratch.products[: dout.numel()].view(dout.shape)
                dlower += torch.mul(dout, tile, out=product).sum(dim=2, keepdim=True)
                # The last use of dout, so its memory takes the product.
                dtile += dout.mul_(lower).sum(dim=1, keepdim=True)


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
