"""The order of samples of several sources, in shares: a pure function, exact at every prefix.

Sources are the leaves of a Huffman tree with their weights. At a node of weight A whose left child
has the weight a, L(m) = (2 m a + A) // (2 A) of its first m draws go left: m a / A, rounded half
up. So draw m goes left if L(m + 1) > L(m), as draw L(m) of the left child, and else right, as draw
m - L(m). At a leaf the number of the draw is the index in the source's own order.

The count of a node is off by at most its share of what its parent is off, plus 1/2. An inner node
of a Huffman tree has at most 2/3 of its parent's weight, since its sibling is no lighter than its
heavier child. So inner nodes are off by less than 3/2, and **every source by less than 2, for any
number of sources and after any number of draws**.

Draws are then permuted within each update. So each update has its share of each source, and no
rank reads one source alone.
"""

import hashlib
import heapq
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Annotated, NamedTuple

import numpy as np
from pydantic import Field

from longhaul.datamodules.order import (
    ROUNDS,
    Indices,
    SampleLocations,
    SampleOrder,
    StoredOrder,
    mix,
    permute,
)

# 2 m A fits into 64 bits for 2^42 samples.
_MOST_WEIGHT = 1 << 20
_DECIMALS = 10**6
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)

Weight = Annotated[int, Field(ge=1, le=_MOST_WEIGHT)]


class Stage(NamedTuple):
    """From which token on which weights hold."""

    at_tokens: Annotated[int, Field(ge=0, le=1 << 62)]
    """Trained before. It is rounded up to a whole number of updates."""
    weights: Annotated[dict[str, Weight], Field(min_length=1)]
    """An integer for each source that is read, by its name."""


def integer_weights(weights: Mapping[str, float]) -> dict[str, int]:
    """Weights as integers, those of 0 left out.

    Whole numbers with a sum of at most 2^20 stay as they are. Others become millionths of their
    sum, by largest remainders, and 1 at least. Here 0.1 is a tenth, and not the float next to it.
    """
    exact = {name: Fraction(repr(weight)) for name, weight in weights.items() if weight}
    total = sum(exact.values())
    if total <= _MOST_WEIGHT and all(one.denominator == 1 for one in exact.values()):
        return {name: int(one) for name, one in exact.items()}
    quotas = {name: one * _DECIMALS / total for name, one in exact.items()}
    found = {name: max(1, int(quota)) for name, quota in quotas.items()}
    while (missing := _DECIMALS - sum(found.values())) != 0:
        # Those of which too much is cut off come first, ties by name. Where tiny weights were
        # raised to 1, the largest pays.
        by_rest = sorted(found, key=lambda name: (found[name] - quotas[name], name))
        if missing < 0:
            found[max(found, key=lambda name: (found[name], name))] += missing
        for name in by_rest[: max(0, missing)]:
            found[name] += 1
    return found


class _Node(NamedTuple):
    weight: int
    source: int
    """Index of the source, at a leaf; else -1."""
    left: "_Node | None" = None
    right: "_Node | None" = None

    def left_draws(self, draws: Indices) -> Indices:
        """How many of the first draws of this node go left, for each number of draws."""
        assert self.left is not None
        return (2 * draws * self.left.weight + self.weight) // (2 * self.weight)

    def add_counts(self, draws: Indices, counts: dict[int, Indices]) -> None:
        """Set how many of the first draws each source below has, by its index."""
        if self.left is None or self.right is None:
            counts[self.source] = draws
            return
        left = self.left_draws(draws)
        self.left.add_counts(left, counts)
        self.right.add_counts(draws - left, counts)

    def place(self, draws: Indices, of: Indices, source: Indices, index: Indices) -> None:
        """Set source and index for the draws of this node, which are at `of` in the results."""
        if not draws.size:
            return
        if self.left is None or self.right is None:
            source[of], index[of] = self.source, draws
            return
        before = self.left_draws(draws)
        is_left = self.left_draws(draws + 1) > before
        self.left.place(before[is_left], of[is_left], source, index)
        is_right = ~is_left
        self.right.place((draws - before)[is_right], of[is_right], source, index)


def _tree(weights: Mapping[str, int], places: Mapping[str, int]) -> _Node:
    """The Huffman tree of sources: the two lightest are joined, ties by name."""
    heap = [(weight, name, _Node(weight, places[name])) for name, weight in weights.items()]
    heapq.heapify(heap)
    while len(heap) > 1:
        (a, first, left), (b, second, right) = heapq.heappop(heap), heapq.heappop(heap)
        heapq.heappush(heap, (a + b, min(first, second), _Node(a + b, -1, left, right)))
    return heap[0][2]


class _Part(NamedTuple):
    """A stage by samples."""

    first: int
    """First sample of the stage, a multiple of an update's."""
    tree: _Node
    before: Indices
    """Draws of each source in the stages before, shape (sources,)."""


class MixtureOrder:
    """The order in which training reads the windows of several sources, for endless epochs.

    Args:
        orders: of each source, by its name, in the order in which sources are numbered.
        stages: the weights, the first from 0 tokens on.
        context: tokens per sample.
        samples_per_update: draws that are permuted together.
        seed: any integer.
    """

    def __init__(
        self,
        orders: Mapping[str, SampleOrder],
        stages: Sequence[Stage],
        *,
        context: int,
        samples_per_update: int,
        seed: int,
    ) -> None:
        self._orders = tuple(orders.values())
        self._size = samples_per_update
        digest = hashlib.blake2b(f"{seed}/mixture".encode(), digest_size=8 * ROUNDS).digest()
        self._keys = np.frombuffer(digest, "<u8").astype(np.uint64)
        places = {name: place for place, name in enumerate(orders)}
        self._parts: list[_Part] = []
        for stage in stages:
            first = -(-stage.at_tokens // (context * samples_per_update)) * samples_per_update
            tree = _tree(stage.weights, places)
            self._parts.append(_Part(first, tree, self.counts(first)))
        self._firsts = np.array([part.first for part in self._parts])

    @property
    def samples_per_source(self) -> Indices:
        """Samples in an epoch of each source, shape (sources,)."""
        return np.array([order.samples_per_epoch for order in self._orders])

    def counts(self, samples: int) -> Indices:
        """How many of the first samples each source has, at an update's end; shape (sources,)."""
        total = np.zeros(len(self._orders), np.int64)
        for part in reversed(self._parts):
            if samples >= part.first:
                counts: dict[int, Indices] = {}
                part.tree.add_counts(np.array(samples - part.first), counts)
                total[list(counts)] = list(counts.values())
                return total + part.before
        return total

    def sources_of(self, indices: Indices) -> tuple[Indices, Indices]:
        """The source of each sample, and the sample's index in the order of its source."""
        if indices.size and indices.min() < 0:
            raise ValueError(f"indices: found {indices.min()}, wanted 0 or more")
        block, place = np.divmod(indices, self._size)
        keys = mix(self._keys[:, None] + block.astype(np.uint64) * _GOLDEN)  # (rounds, samples)
        draws = block * self._size + permute(place, self._size, keys)
        source, index = np.empty_like(indices), np.empty_like(indices)
        stage = np.searchsorted(self._firsts, draws, side="right") - 1
        for number in np.unique(stage):
            part, of = self._parts[number], np.nonzero(stage == number)[0]
            part.tree.place(draws[of] - part.first, of, source, index)
            index[of] += part.before[source[of]]
        return source, index

    def locate_many(self, indices: Indices) -> SampleLocations:
        """The locations of the samples with these global indices, which count on across epochs."""
        source, index = self.sources_of(indices)
        found = SampleLocations(source, *(np.empty_like(indices) for _ in range(4)))
        for number in np.unique(source):
            of = np.nonzero(source == number)[0]
            own = self._orders[number].locate_many(index[of])
            for whole, part in zip(found[1:], own[1:], strict=True):
                whole[of] = part
        return found

    def upcoming(self, index: int) -> list[tuple[int, tuple[int, ...]]]:
        """Each source, with those of its shards that samples from `index` on soon need."""
        begun = self.counts(index // self._size * self._size)
        return [
            (number, shards)
            for number, order in enumerate(self._orders)
            for _, shards in order.upcoming(int(begun[number]))
        ]


Order = SampleOrder | MixtureOrder | StoredOrder
