"""Symmetric-power features, transposed (tokens innermost), built one tile row at a time.

README.md, section 3, defines the layout and its recursion, eq. (8): the features of degree p whose
first tile is I are x[tile I] ⊗ (features of degree p − 1 with all tiles ≥ I). The latter are a
suffix of the list of degree p − 1, because the list is sorted by tiles.
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
    """Number of orderings of its tiles that each feature represents, eq. (7)."""
    per_tile = torch.tensor(_tile_multiplicity(width, degree), dtype=like.dtype)
    return per_tile.repeat_interleave(tile_width(degree) ** degree).to(like.device)


def _level_sizes(width: int, degree: int) -> list[int]:
    """Number of features of degree 1, 2, … `degree`, all with the tile width of `degree`."""
    tile = tile_width(degree)
    tiles = padded_width(width, degree) // tile
    return [comb(tiles + d - 1, d) * int(tile**d) for d in range(1, degree + 1)]


def _suffix(tiles: int, degree: int, tile: int) -> int:
    """Number of features of degree − 1 that eq. (8) multiplies with the first of so many tiles."""
    return comb(tiles + degree - 2, degree - 1) * int(tile ** (degree - 1))


class _TileRow(NamedTuple):
    """One step of eq. (8): level[span] = lower ⊗ x[tile], as views that broadcast."""

    lower: Tensor  # (rows, suffix, 1, tokens)
    tile: Tensor  # (rows, 1, tile, tokens)
    span: slice


def _tile_rows(lower: Tensor, x: Tensor, degree: int, tile: int) -> list[_TileRow]:
    """The steps of eq. (8) from the features of degree − 1 in `lower` to those of `degree`."""
    width = x.shape[1]
    steps = []
    offset = 0
    for start in range(0, width, tile):
        suffix = _suffix((width - start) // tile, degree, tile)
        span = slice(offset, offset + suffix * tile)
        steps.append(_TileRow(lower[:, -suffix:, None], x[:, None, start : start + tile], span))
        offset = span.stop
    return steps


class StateToRead(NamedTuple):
    """A state (rows, V + 1, P), and views of the parts that belong to each tile row, transposed.

    The state is times the multiplicity of its features; for compiled products, which multiply by
    it themselves, it is the sums as they are, and has no views.
    """

    state: Tensor
    tile_rows: list[Tensor]

    @classmethod
    def of(cls, state: Tensor, width: int, degree: int) -> StateToRead:
        tile = tile_width(degree)
        tiles = range(padded_width(width, degree) // tile, 0, -1)
        sizes = [_suffix(left, degree, tile) * tile for left in tiles]
        return cls(state, [part.mT for part in state.split(sizes, dim=2)])


class FeatureScratch:
    """Memory for the features of some tokens and their gradients, allocated at first use.

    Queries and keys of one block of rows share it, as only one φ exists at a time.
    """

    def __init__(self, rows: int, width: int, tokens: int, degree: int, like: Tensor) -> None:
        self.degree, self.tile = degree, tile_width(degree)
        self._shapes = [(rows, size, tokens) for size in _level_sizes(width, degree)]
        self._like = like

    @cached_property
    def levels(self) -> list[Tensor]:
        """Features of degree 2, 3, …: (rows, features, tokens)."""
        return [self._like.new_empty(shape) for shape in self._shapes[1:]]

    @cached_property
    def dlevels(self) -> list[Tensor]:
        """Their gradients. That of the highest degree never exists as a whole."""
        return [self._like.new_empty(shape) for shape in self._shapes[1:-1]]

    @cached_property
    def tile_rows(self) -> Tensor:
        """Flat memory for two tensors of the size of the widest tile row."""
        rows, suffix, tokens = self._shapes[-2]
        return self._like.new_empty(2, rows * suffix * self.tile * tokens)


class _Contraction(NamedTuple):
    """The gradient of the features of one tile row, and memory for its products."""

    row: _TileRow
    drow: _TileRow
    flat: Tensor  # (rows, suffix * tile, tokens)
    dfeatures: Tensor  # the same memory as (rows, suffix, tile, tokens)
    product: Tensor  # the same shape


class TorchFeatureMap:
    """φ of a buffer x (rows, K, tokens), K padded to whole tiles. Its backward adds to dx.

    The views of every step are made once, because at these sizes making a view costs as much as
    the arithmetic on it.
    """

    def __init__(self, x: Tensor, dx: Tensor, scratch: FeatureScratch) -> None:
        self._x, self._dx, self._scratch = x, dx, scratch

    def _all_rows(self, x: Tensor, levels: list[Tensor]) -> list[list[_TileRow]]:
        lowers = [x, *levels]
        return [
            _tile_rows(lower, x, degree, self._scratch.tile)
            for degree, lower in enumerate(lowers, start=2)
        ]

    @cached_property
    def _rows(self) -> list[list[_TileRow]]:
        return self._all_rows(self._x, self._scratch.levels[:-1])

    @cached_property
    def _drows(self) -> list[list[_TileRow]]:
        return self._all_rows(self._dx, self._scratch.dlevels)

    @cached_property
    def _steps(self) -> list[list[tuple[Tensor, Tensor, Tensor]]]:
        """(lower, tile, out) of every step, for every level."""
        return [
            [(row.lower, row.tile, self._part(level, row)) for row in rows]
            for rows, level in zip(self._rows, self._scratch.levels, strict=True)
        ]

    def _part(self, level: Tensor, row: _TileRow) -> Tensor:
        """The part of a level that a tile row writes, (rows, suffix, tile, tokens)."""
        rows, suffix, _, tokens = row.lower.shape
        return level[:, row.span].view(rows, suffix, self._scratch.tile, tokens)

    def features(self) -> Tensor:
        """φ(x), (rows, P, tokens), in the shared buffer."""
        if self._scratch.degree == 1:
            return self._x
        for level in self._steps:
            for lower, tile, out in level:
                torch.mul(lower, tile, out=out)
        return self._scratch.levels[-1]

    def read(self, read: StateToRead, out: Tensor) -> None:
        """Write state φ(x), (rows, V + 1, tokens)."""
        torch.bmm(read.state, self.features(), out=out)

    def add_to(self, state: Tensor, values: Tensor, keep: Tensor | float) -> None:
        """state ← keep · state + values φ(x)ᵀ; keep is (rows, 1, 1), 1 or 0."""
        if isinstance(keep, Tensor):
            state.mul_(keep)
        # Not torch.baddbmm(…, out=…), which first copies the state.
        beta = 1 if isinstance(keep, Tensor) else keep
        state.baddbmm_(values, self.features().mT, beta=beta)

    @cached_property
    def _contractions(self) -> list[_Contraction]:
        """The steps of the highest level of `contract`, in memory that all of them share."""
        steps = []
        for row, drow in zip(self._rows[-1], self._drows[-1], strict=True):
            rows, suffix, _, tokens = row.lower.shape
            shape = (rows, suffix * self._scratch.tile, tokens)
            flat = self._scratch.tile_rows[:, : prod(shape)]
            dfeatures, product = flat.view(2, *shape).unbind(0)
            whole = (rows, suffix, self._scratch.tile, tokens)
            step = _Contraction(row, drow, dfeatures, dfeatures.view(whole), product.view(whole))
            steps.append(step)
        return steps

    def contract(self, read: StateToRead, values: Tensor) -> None:
        """Add to dx the gradient of Σ values · (state φ(x)), by the product rule on eq. (8).

        read.state is (rows, V + 1, P), values (rows, V + 1, tokens). The gradient of φ itself is a
        matrix product, computed one tile row at a time and consumed while it is in cache.
        """
        if self._scratch.degree == 1:
            self._dx.baddbmm_(read.state.mT, values)
            return
        for level in self._steps[:-1]:
            for lower, tile, out in level:
                torch.mul(lower, tile, out=out)
        for gradient in self._scratch.dlevels:
            gradient.zero_()
        for state, step in zip(read.tile_rows, self._contractions, strict=True):
            torch.bmm(state, values, out=step.flat)
            self._product_rule(step.row, step.drow, step.dfeatures, step.product)
        lower_levels = list(zip(self._rows, self._drows, self._scratch.dlevels, strict=False))
        for rows_of_level, drows, dlevel in reversed(lower_levels):
            for row, drow in zip(rows_of_level, drows, strict=True):
                dfeatures = self._part(dlevel, row)
                product = self._scratch.tile_rows[0, : dfeatures.numel()].view(dfeatures.shape)
                self._product_rule(row, drow, dfeatures, product)

    @staticmethod
    def _product_rule(row: _TileRow, drow: _TileRow, dout: Tensor, product: Tensor) -> None:
        drow.lower.add_(torch.mul(dout, row.tile, out=product).sum(dim=2, keepdim=True))
        # This is the last use of dout, so the product may overwrite it.
        drow.tile.add_(dout.mul_(row.lower).sum(dim=1, keepdim=True))


def expand(x: Float[Tensor, "*rows K"], degree: int) -> Float[Tensor, "*rows P"]:
    """φ(x) with the width innermost, differentiable; meant for single tokens."""
    tile = tile_width(degree)
    width = padded_width(x.shape[-1], degree)
    x = torch.nn.functional.pad(x, (0, width - x.shape[-1]))
    tiles = width // tile
    lower = x
    for d in range(2, degree + 1):
        blocks = []
        for i in range(tiles):
            suffix = _suffix(tiles - i, d, tile)
            first = x[..., None, i * tile : (i + 1) * tile]
            blocks.append((lower[..., lower.shape[-1] - suffix :, None] * first).flatten(-2))
        lower = torch.cat(blocks, dim=-1)
    return lower
