"""The order of samples: a pure function of (seed, epoch, index), at the same cost for every index.

An epoch contains every window of every document once. The shards are permuted, and consecutive
groups of `shuffle_shards` shards form blocks. The windows of a block are permuted together. Both
permutations come from keyed integer mixing instead of a library's random generator, whose numbers
may change between versions.
"""

import functools
import hashlib
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from longhaul.datamodules.manifest import Manifest

_ROUNDS = 6

Indices = NDArray[np.int64]


class SampleLocation(NamedTuple):
    """Where one sample is. All positions count from 0."""

    epoch: int
    """Number of the epoch."""
    shard: int
    """Position of the shard in the manifest."""
    document: int
    """Position of the document in the shard."""
    window: int
    """Position of the window in the document, in windows of `context` tokens."""


@dataclass(frozen=True)
class SampleLocations:
    """Where many samples are: the fields of `SampleLocation`, as arrays."""

    epoch: Indices
    shard: Indices
    document: Indices
    window: Indices


class SampleOrder:
    """The order in which training reads the windows of all shards, for endless epochs.

    Args:
        manifest: the shards.
        context: tokens per window; a divisor of the length of a document.
        seed: any integer. Another seed gives another order.
        shuffle_shards: number of shards whose windows are shuffled together.
    """

    def __init__(self, manifest: Manifest, context: int, seed: int, shuffle_shards: int) -> None:
        self.windows_per_document = windows_per_document(manifest, context)
        self._samples = _samples_of_shards(manifest, self.windows_per_document)
        self.samples_per_epoch = int(self._samples.sum())
        self.seed = seed
        self.shuffle_shards = shuffle_shards

    def locate(self, index: int) -> SampleLocation:
        """The location of the sample with this global index, which counts on across epochs."""
        found = self.locate_many(np.array([index], np.int64))
        return SampleLocation(
            int(found.epoch[0]), int(found.shard[0]), int(found.document[0]), int(found.window[0])
        )

    def locate_many(self, indices: Indices) -> SampleLocations:
        """`locate` for an array of indices, much faster than one by one."""
        if indices.size and indices.min() < 0:
            raise ValueError(f"indices: found {indices.min()}, wanted 0 or more")
        epochs, offsets = np.divmod(indices, self.samples_per_epoch)
        shard = np.empty_like(indices)
        sample = np.empty_like(indices)
        for epoch in np.unique(epochs):
            of_epoch = np.nonzero(epochs == epoch)[0]
            plan = _plan_epoch(self, int(epoch))
            blocks = np.searchsorted(plan.block_ends, offsets[of_epoch], side="right")
            for block in np.unique(blocks):
                chosen = of_epoch[blocks == block]
                shard[chosen], sample[chosen] = self._in_block(
                    plan, int(epoch), int(block), offsets[chosen]
                )
        document, window = np.divmod(sample, self.windows_per_document)
        return SampleLocations(epochs, shard, document, window)

    def _in_block(
        self, plan: "_EpochPlan", epoch: int, block: int, offsets: Indices
    ) -> tuple[Indices, Indices]:
        """The shard and the sample in that shard, for offsets into an epoch within one block."""
        start = int(plan.block_ends[block - 1]) if block else 0
        size = int(plan.block_ends[block]) - start
        shards = plan.shards[block * self.shuffle_shards : (block + 1) * self.shuffle_shards]
        places = permute(offsets - start, size, _keys(self.seed, epoch, f"block {block}"))
        ends = np.cumsum(self._samples[shards])
        which = np.searchsorted(ends, places, side="right")
        return shards[which], places - (ends - self._samples[shards])[which]


class DocumentOrder:
    """The order of validation: windows in the order in which the shards store them."""

    def __init__(self, manifest: Manifest, context: int) -> None:
        self.windows_per_document = windows_per_document(manifest, context)
        self._ends = np.cumsum(_samples_of_shards(manifest, self.windows_per_document))
        self.samples_per_epoch = int(self._ends[-1])

    def locate_many(self, indices: Indices) -> SampleLocations:
        """The locations of the samples with these indices, all below `samples_per_epoch`."""
        shard = np.searchsorted(self._ends, indices, side="right")
        starts = np.concatenate([np.zeros(1, np.int64), self._ends[:-1]])
        document, window = np.divmod(indices - starts[shard], self.windows_per_document)
        return SampleLocations(np.zeros_like(indices), shard, document, window)


def windows_per_document(manifest: Manifest, context: int, key: str = "data.context") -> int:
    """Samples per document.

    Args:
        manifest: of the documents.
        context: tokens per sample.
        key: that the context was given with.

    Raises:
        ValueError: the context does not divide the document.
    """
    length = manifest.document_tokens
    if not 1 <= context <= length or length % context:
        small = [d for d in range(1, math.isqrt(length) + 1) if length % d == 0]
        divisors = [*small, *(length // d for d in small)]
        below = max((d for d in divisors if d <= context), default=1)
        raise ValueError(
            f"{key}: {context} does not divide the documents' {length} tokens "
            f"({manifest.location}); the nearest below that does is {below}"
        )
    return length // context


def permute(places: Indices, size: int, keys: NDArray[np.uint64]) -> Indices:
    """The image of each place under the permutation of range(size) that the keys define.

    A Feistel network permutes all numbers with an even number of bits. A number outside range(size)
    is permuted again until it is inside, which takes at most 3 extra rounds on average.
    """
    half = np.uint64(max(1, (max(size - 1, 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    values = places.astype(np.uint64)
    outside = np.arange(values.size)
    while outside.size:
        left, right = values[outside] >> half, values[outside] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right + key) & mask)
        values[outside] = (left << half) | right
        outside = outside[values[outside] >= np.uint64(size)]
    return values.astype(np.int64)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Make every bit of a 64-bit number depend on all its bits: the finaliser of splitmix64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _keys(seed: int, epoch: int, purpose: str) -> NDArray[np.uint64]:
    digest = hashlib.blake2b(f"{seed}/{epoch}/{purpose}".encode(), digest_size=8 * _ROUNDS).digest()
    return np.frombuffer(digest, "<u8").astype(np.uint64)


class _EpochPlan(NamedTuple):
    shards: Indices
    """Positions of the shards in the manifest, in the order of the epoch."""
    block_ends: Indices
    """Number of samples up to the end of each block."""


@functools.lru_cache(maxsize=8)
def _plan_epoch(order: SampleOrder, epoch: int) -> _EpochPlan:
    samples = order._samples
    count = samples.size
    shards = permute(np.arange(count), count, _keys(order.seed, epoch, "shards"))
    ends = np.cumsum(samples[shards])
    last = np.minimum(np.arange(order.shuffle_shards, count + order.shuffle_shards), count) - 1
    return _EpochPlan(shards, ends[last[:: order.shuffle_shards]])


def _samples_of_shards(manifest: Manifest, windows: int) -> Indices:
    return np.array([shard.documents * windows for shard in manifest.shards], np.int64)
