"""The order of samples: a pure function of (seed, epoch, index), at the same cost for every index.

An epoch contains every window of every block once. The shards are permuted, and then divided into
groups of `shuffle_shards` consecutive shards. The windows of a group are permuted together. Both
permutations come from keyed integer mixing instead of a library's random generator, whose numbers
may change between versions.
"""

import functools
import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

ROUNDS = 6

Indices = NDArray[np.int64]


class SampleLocations(NamedTuple):
    """Where samples are, as arrays of one entry a sample. All positions count from 0."""

    source: Indices
    """Index of the source in the corpus."""
    epoch: Indices
    """Number of the epoch of that source."""
    shard: Indices
    """Position of the shard in the source."""
    block: Indices
    """Position of the block in the shard."""
    window: Indices
    """Position of the window in the block, in windows of `context` tokens."""


class SampleOrder:
    """The order in which training reads the windows of all shards, for endless epochs.

    Args:
        blocks: number of blocks in each shard.
        windows_per_block: samples in each block.
        seed: an integer, or text. Another seed gives another order.
        shuffle_shards: number of shards whose windows are shuffled together.
    """

    def __init__(
        self, blocks: Sequence[int], windows_per_block: int, seed: int | str, shuffle_shards: int
    ) -> None:
        self.windows_per_block = windows_per_block
        self._samples = np.array(blocks, np.int64) * windows_per_block
        self.samples_per_epoch = int(self._samples.sum())
        self.seed = seed
        self.shuffle_shards = shuffle_shards

    def locate_many(self, indices: Indices) -> SampleLocations:
        """The locations of the samples with these global indices, which count on across epochs."""
        if indices.size and indices.min() < 0:
            raise ValueError(f"indices: found {indices.min()}, wanted 0 or more")
        epochs, offsets = np.divmod(indices, self.samples_per_epoch)
        shard = np.empty_like(indices)
        sample = np.empty_like(indices)
        for epoch in np.unique(epochs):
            of_epoch = np.nonzero(epochs == epoch)[0]
            plan = _plan_epoch(self, int(epoch))
            groups = np.searchsorted(plan.group_ends, offsets[of_epoch], side="right")
            for group in np.unique(groups):
                chosen = of_epoch[groups == group]
                shard[chosen], sample[chosen] = self._in_group(
                    plan, int(epoch), int(group), offsets[chosen]
                )
        block, window = np.divmod(sample, self.windows_per_block)
        return SampleLocations(np.zeros_like(indices), epochs, shard, block, window)

    def upcoming(self, index: int) -> list[tuple[int, tuple[int, ...]]]:
        """Each source, with those of its shards that samples from `index` on soon need.

        They are the shards of the sample's group and of the next one.
        """
        epoch, offset = divmod(index, self.samples_per_epoch)
        plan = _plan_epoch(self, epoch)
        first = int(np.searchsorted(plan.group_ends, offset, side="right")) * self.shuffle_shards
        shards = plan.shards[first : first + 2 * self.shuffle_shards].tolist()
        if first + self.shuffle_shards >= plan.shards.size:
            shards += _plan_epoch(self, epoch + 1).shards[: self.shuffle_shards].tolist()
        return [(0, tuple(dict.fromkeys(shards)))]

    def _in_group(
        self, plan: "_EpochPlan", epoch: int, group: int, offsets: Indices
    ) -> tuple[Indices, Indices]:
        """The shard and the sample in that shard, for offsets into an epoch within one group."""
        start = int(plan.group_ends[group - 1]) if group else 0
        size = int(plan.group_ends[group]) - start
        shards = plan.shards[group * self.shuffle_shards : (group + 1) * self.shuffle_shards]
        # The key keeps the old name of a group, or no run could resume.
        places = permute(offsets - start, size, _keys(self.seed, epoch, f"block {group}"))
        ends = np.cumsum(self._samples[shards])
        which = np.searchsorted(ends, places, side="right")
        return shards[which], places - (ends - self._samples[shards])[which]


class StoredOrder:
    """The order of validation: windows in the order in which the shards store them.

    Args:
        blocks: number of blocks in each shard of each source.
        windows_per_block: samples in each block of each source.
        each: the first samples of each source that are read; None: all.
    """

    def __init__(
        self,
        blocks: Sequence[Sequence[int]],
        windows_per_block: Sequence[int],
        each: int | None = None,
    ) -> None:
        self._windows_per_block = tuple(windows_per_block)
        self._ends = [
            np.cumsum(np.array(some, np.int64) * windows)
            for some, windows in zip(blocks, windows_per_block, strict=True)
        ]
        self.samples_per_source = tuple(
            min(int(ends[-1]), each or int(ends[-1])) for ends in self._ends
        )
        self.samples_per_epoch = sum(self.samples_per_source)

    def locate_many(self, indices: Indices) -> SampleLocations:
        """The locations of the samples with these indices, all below `samples_per_epoch`."""
        found = SampleLocations(*(np.zeros_like(indices) for _ in range(5)))
        last = np.cumsum(self.samples_per_source)
        found.source[:] = np.searchsorted(last, indices, side="right")
        for number in np.unique(found.source):
            of = found.source == number
            own = indices[of] - (last[number] - self.samples_per_source[number])
            ends = self._ends[number]
            shard = np.searchsorted(ends, own, side="right")
            starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
            found.shard[of] = shard
            found.block[of], found.window[of] = np.divmod(
                own - starts[shard], self._windows_per_block[number]
            )
        return found

    def upcoming(self, index: int) -> list[tuple[int, tuple[int, ...]]]:
        """The shard of the sample with this index, as `SampleOrder.upcoming` does.

        Not the next one: validation mostly ends before that.
        """
        found = self.locate_many(np.array([index]))
        return [(int(found.source[0]), (int(found.shard[0]),))]


def permute(places: Indices, size: int, keys: NDArray[np.uint64]) -> Indices:
    """The image of each place under the permutation of range(size) that the keys define.

    A Feistel network permutes all numbers with an even number of bits. A number outside range(size)
    is permuted again until it is inside, which takes at most 3 extra rounds on average.

    Args:
        places: numbers below `size`, shape (n,).
        keys: one for each round, shape (rounds,), or (rounds, n) where places have keys of their
            own.
    """
    half = np.uint64(max(1, (max(size - 1, 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    values = places.astype(np.uint64)
    outside = np.arange(values.size)
    while outside.size:
        left, right = values[outside] >> half, values[outside] & mask
        for key in keys if keys.ndim == 1 else keys[:, outside]:
            left, right = right, left ^ (mix(right + key) & mask)
        values[outside] = (left << half) | right
        outside = outside[values[outside] >= np.uint64(size)]
    return values.astype(np.int64)


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Make every bit of a 64-bit number depend on all its bits: the finaliser of splitmix64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _keys(seed: int | str, epoch: int, purpose: str) -> NDArray[np.uint64]:
    digest = hashlib.blake2b(f"{seed}/{epoch}/{purpose}".encode(), digest_size=8 * ROUNDS).digest()
    return np.frombuffer(digest, "<u8").astype(np.uint64)


class _EpochPlan(NamedTuple):
    shards: Indices
    """Positions of the shards in the source, in the order of the epoch."""
    group_ends: Indices
    """Number of samples up to the end of each group."""


# Room for the present and the next epoch of many sources.
@functools.lru_cache(maxsize=256)
def _plan_epoch(order: SampleOrder, epoch: int) -> _EpochPlan:
    samples = order._samples
    count = samples.size
    shards = permute(np.arange(count), count, _keys(order.seed, epoch, "shards"))
    ends = np.cumsum(samples[shards])
    last = np.minimum(np.arange(order.shuffle_shards, count + order.shuffle_shards), count) - 1
    return _EpochPlan(shards, ends[last[:: order.shuffle_shards]])
