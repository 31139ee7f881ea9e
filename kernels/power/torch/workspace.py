"""Memory for one block of rows and one segment, allocated once and reused for every segment.

Buffers are (blocks, rows, width, tokens of a block). A block of a buffer is contiguous: otherwise
torch's batched products would process one row after the other.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from longhaul.kernels.power.torch.attention import InsideChunks, Keys
from longhaul.kernels.power.torch.chunking import CallSizes, Decay, Rows, Segment
from longhaul.kernels.power.torch.compiled import (
    CompiledFeatureMap,
    copy_transposed,
    maps_features,
)
from longhaul.kernels.power.torch.features import FeatureScratch, TorchFeatureMap
from longhaul.kernels.shapes import padded_width

FeatureMap = TorchFeatureMap | CompiledFeatureMap


class _Buffers:
    """Buffers of one side, queries or keys. Those of values and numerators have V + 1 rows."""

    def __init__(self, problem: CallSizes, scratch: FeatureScratch, like: Tensor) -> None:
        self._problem, self._scratch, self._like = problem, scratch, like

    def _new(self, width: int) -> Tensor:
        problem = self._problem
        shape = problem.blocks_at_once, problem.num_rows, width, problem.block_size
        return self._like.new_empty(shape)

    def _new_keys(self) -> Tensor:
        return self._new(padded_width(self._problem.K, self._problem.degree)).zero_()

    def _new_values(self) -> Tensor:
        return self._new(self._problem.V + 1)

    def _maps(self, x: Tensor, dx: Tensor) -> list[FeatureMap]:
        blocks = zip(x, dx, strict=True)
        if maps_features(self._problem.degree, self._like):
            return [CompiledFeatureMap(*block) for block in blocks]
        return [TorchFeatureMap(*block, self._scratch) for block in blocks]


class QueryBuffers(_Buffers):
    """Of one query head per key head."""

    @cached_property
    def q(self) -> Tensor:
        """Scaled queries."""
        return self._new_keys()

    @cached_property
    def dq(self) -> Tensor:
        return self._new_keys()

    @cached_property
    def num(self) -> Tensor:
        """Numerators, and denominators in row V; in a backward pass their gradients."""
        return self._new_values()

    @cached_property
    def state_num(self) -> Tensor:
        """What is read from states; in a backward pass num times the decays from the start."""
        return self._new_values()

    @cached_property
    def unit(self) -> Tensor:
        """The units of rows, eq. (17); in a backward pass den^(−1/p)."""
        return self._new(1)

    @cached_property
    def maps(self) -> list[FeatureMap]:
        """φ of the queries of each block."""
        return self._maps(self.q, self.dq)


class KeyBuffers(_Buffers):
    """Of the key heads."""

    @cached_property
    def k(self) -> Tensor:
        return self._new_keys()

    @cached_property
    def dk(self) -> Tensor:
        return self._new_keys()

    @cached_property
    def v(self) -> Tensor:
        """Values, with a row of ones."""
        values = self._new_values()
        values[..., -1, :].fill_(1)
        return values

    @cached_property
    def dv(self) -> Tensor:
        return self._new_values()

    @cached_property
    def faded(self) -> Tensor:
        """Values times the decays to the end of the chunk."""
        return self._new_values()

    @cached_property
    def state_dv(self) -> Tensor:
        """Gradients of `faded`."""
        return self._new_values()

    @cached_property
    def maps(self) -> list[FeatureMap]:
        """φ of the keys of each block."""
        return self._maps(self.k, self.dk)


def add_faded(into: Tensor, x: Tensor, decay: Tensor | None) -> None:
    """Add x times its decays; None means no decay."""
    if decay is None:
        into.add_(x)
    else:
        into.addcmul_(x, decay)


class Workspace:
    """All buffers of a pass."""

    def __init__(self, problem: CallSizes, like: Tensor) -> None:
        self._problem, self._like = problem, like
        self._rows = problem.rows_per_block
        # Queries and keys share this memory, as only one φ exists at a time.
        sizes = problem.num_rows, problem.K, problem.block_size
        scratch = FeatureScratch(*sizes, problem.degree, like)
        self.keys = KeyBuffers(problem, scratch, like)
        self.queries = [QueryBuffers(problem, scratch, like) for _ in range(problem.R)]

    @cached_property
    def inside(self) -> InsideChunks:
        """Attention inside chunks. Made at first use, since a state alone never needs it."""
        return InsideChunks(self._problem, self._like)

    def inside_keys(self, segment: Segment, decay: Decay | None) -> Keys:
        """What attention inside chunks reads of keys and values."""
        k, v = (x[: segment.blocks].flatten(0, 1) for x in (self.keys.k, self.keys.v))
        return Keys(k, v, None if decay is None else decay.log_decay.flatten(0, 1).contiguous())

    def faded_values(self, segment: Segment, decay: Decay | None) -> Tensor:
        """Values times the decays to the end of their chunk, (blocks, rows, V + 1, tokens)."""
        v, faded = (x[: segment.blocks] for x in (self.keys.v, self.keys.faded))
        return v if decay is None else torch.mul(v, decay.to_end, out=faded)

    def load(
        self, into: Tensor, source: Tensor, rows: Rows, segment: Segment, scale: float = 1.0
    ) -> None:
        """Copy the segment's part of `source` (B, T, heads, width) into a buffer, transposed.

        Absent tokens of its last block are zeros. Rows of the buffer beyond the width stay.
        """
        for target, part in self._parts(into, source, rows, segment):
            copy_transposed(part, target, scale=scale, add=False)
        size = self._problem.block_size
        present = (segment.end - segment.start) % size
        if present:
            into[segment.blocks - 1, :, : source.shape[3], present:].zero_()

    def store(
        self, x: Tensor, into: Tensor, rows: Rows, segment: Segment, *, add: bool = False
    ) -> None:
        """Copy a buffer into the segment's part of `into` (B, T, heads, width)."""
        for part, target in self._parts(x, into, rows, segment):
            copy_transposed(part, target, scale=1.0, add=add)

    def _parts(
        self, buffer: Tensor, outside: Tensor, rows: Rows, segment: Segment
    ) -> list[tuple[Tensor, Tensor]]:
        """Pairs of views (blocks, b, h, width, tokens): of a buffer, of the same tokens outside.

        The first pair is of all whole blocks, the second of the tokens of the last, shorter block.
        """
        width, size = outside.shape[3], self._problem.block_size
        tokens = segment.end - segment.start
        whole, rest = divmod(tokens, size)
        by_head = buffer[:, :, :width].unflatten(1, self._rows)  # (blocks, b, h, width, size)
        part = outside[rows.batch, segment.start : segment.end, rows.heads]
        found = []
        if whole:
            blocks = part[:, : whole * size].unflatten(1, (whole, size))
            found.append((by_head[:whole], blocks.permute(1, 0, 3, 4, 2)))
        if rest:
            last = part[:, None, whole * size :].permute(1, 0, 3, 4, 2)
            found.append((by_head[whole : whole + 1, ..., :rest], last))
        return found
