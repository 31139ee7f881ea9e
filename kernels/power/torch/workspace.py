"""Memory for one block of rows and one chunk length, allocated once and reused for every chunk.

The views that the inner loops need are also made once, because at these sizes making a view costs
as much as the arithmetic on it.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from longhaul.kernels.power.torch.attention import Buffers, InsideChunk
from longhaul.kernels.power.torch.chunking import FEATURE_TOKENS, Chunk, Problem, Rows
from longhaul.kernels.power.torch.features import FeatureMap, FeatureScratch
from longhaul.kernels.shapes import padded_width


class Workspace:
    """Buffers (rows, width, tokens) of a chunk; values and their gradients have V + 1 rows."""

    def __init__(self, problem: Problem, tokens: int, like: Tensor) -> None:
        self._rows = problem.rows_per_block
        rows = self._rows[0] * self._rows[1]
        width = padded_width(problem.K, problem.degree)
        # Rows whose distance is a large power of two would compete for the same cache lines.
        stride = tokens + (16 if tokens >= 1024 else 0)
        keys = like.new_empty(4, rows, width, stride)[..., :tokens]
        values = like.new_empty(4, rows, problem.V + 1, stride)[..., :tokens]
        self.q, self.k, self.dq, self.dk = keys
        self.v, self.num, self.dnum, self.dv = values
        for x in (self.q, self.k):
            x[:, problem.K :].zero_()
        self.v[:, -1:].fill_(1)
        self.scratch = like.new_empty(rows, problem.V + 1, tokens)
        self.unit = like.new_empty(rows, 1, tokens)
        self.squares = like.new_empty(rows, width, tokens)
        self._degree = problem.degree
        piece = min(tokens, FEATURE_TOKENS)
        scratch = FeatureScratch(rows, problem.K, piece, problem.degree, like)
        self.pieces = [slice(a, min(a + piece, tokens)) for a in range(0, tokens, piece)]
        self.q_maps = [FeatureMap(self.q[:, :, s], self.dq[:, :, s], scratch) for s in self.pieces]
        self.k_maps = [FeatureMap(self.k[:, :, s], self.dk[:, :, s], scratch) for s in self.pieces]

    @cached_property
    def inside(self) -> InsideChunk:
        """Attention inside the chunk. Made at first use, since a state alone never needs it."""
        buffers = (self.q, self.k, self.v, self.num, self.dq, self.dk, self.dv, self.dnum)
        return InsideChunk(Buffers(*buffers, self.unit), self._degree)

    def _by_head(self, x: Tensor, width: int) -> Tensor:
        """(rows, padded width, tokens) as (batch, heads, width, tokens)."""
        return x[:, :width].view(*self._rows, width, -1)

    def load(
        self, into: Tensor, source: Tensor, rows: Rows, chunk: Chunk, scale: float = 1.0
    ) -> None:
        """Copy the block's part of `source` (B, T, heads, width) into a buffer, transposed."""
        part = source[rows.at(chunk)].permute(0, 2, 3, 1)
        target = self._by_head(into, part.shape[2])
        if scale == 1.0:
            target.copy_(part)
        elif part.dtype == target.dtype:
            torch.mul(part, scale, out=target)
        else:
            target.copy_(part).mul_(scale)

    def store(
        self, x: Tensor, into: Tensor, rows: Rows, chunk: Chunk, *, add: bool = False
    ) -> None:
        """Copy a buffer into the block's part of `into` (B, T, heads, width)."""
        target = into[rows.at(chunk)].permute(0, 2, 3, 1)
        part = self._by_head(x, target.shape[2])
        if add:
            target.add_(part)
        else:
            target.copy_(part)

    def scaled(self, x: Tensor, factor: Tensor | None) -> Tensor:
        """x (rows, V + 1, tokens) times a factor per token, in memory that the next call reuses."""
        return x if factor is None else torch.mul(x, factor, out=self.scratch)


class Workspaces:
    """One workspace for full chunks and one for the last, shorter chunk."""

    def __init__(self, problem: Problem, like: Tensor) -> None:
        self._problem, self._like = problem, like
        self._made: dict[int, Workspace] = {}

    def of(self, chunk: Chunk) -> Workspace:
        """The workspace for the chunk's length."""
        tokens = chunk.end - chunk.start
        if tokens not in self._made:
            self._made[tokens] = Workspace(self._problem, tokens, self._like)
        return self._made[tokens]
