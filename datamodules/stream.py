"""Windows of tokens by sample index, the samples of each rank, and batches."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from longhaul.datamodules.mixture import Order
from longhaul.datamodules.order import StoredOrder
from longhaul.datamodules.shards import Ends, Tokens
from longhaul.datamodules.store import ShardStore

# Samples located at a time, because one call of numpy costs as much as some hundred samples.
_MOST_LOCATED = 4096
# From the first of these to the last: many ranks' samples lie between, and with them many groups of
# shards and epochs, each of which costs calls of its own.
_MOST_SPAN = 16 * _MOST_LOCATED
_NO_ENDS: Ends = np.zeros(0, np.uint32)
PADDING_INDEX = -1

Batch = dict[str, Tensor]


class Windows(NamedTuple):
    """The windows that a worker sends, in their stored type: an eighth of the bytes of a batch."""

    tokens: Tokens
    """Shape (b, context)."""
    indices: Sequence[int]
    """Indices of the b samples."""
    is_first: NDArray[np.bool_] | None = None
    """Shape (b, context): whether a token is the first of its document. None: without a mask."""
    sources: Sequence[int] | None = None
    """Index of the source of each of the b samples. None: the one source has no name."""


class TokenWindows(Dataset[Windows]):
    """Windows by the global index of their samples; a list of indices gives a whole batch.

    `PADDING_INDEX` gives the tokens of sample 0, with `PADDING_INDEX` as their index.

    Args:
        stores: the shards of each source.
        order: of the samples.
        context: tokens per window.
        stride: distance from a sample to the one in the same place of this process's next batch.
            It affects speed only.
        has_mask: whether windows come with the documents in them.
        has_names: whether windows come with their sources.
    """

    def __init__(
        self,
        stores: Sequence[ShardStore],
        order: Order,
        context: int,
        stride: int,
        *,
        has_mask: bool = False,
        has_names: bool = False,
    ) -> None:
        self._has_mask = has_mask
        self._has_names = has_names
        self._stores = stores
        self._is_remote = any(store.is_remote for store in stores)
        self._order = order
        # The widest, where sources store tokens in several types.
        self._dtype = np.result_type(*(store.dtype for store in stores))
        self._context = context
        self._stride = stride
        self._located: dict[int, tuple[int, int, int, int]] = {}

    def __getitem__(self, index: int) -> Windows:
        """The window of one sample, as a batch of one."""
        return self.__getitems__([index])

    def __getitems__(self, indices: Sequence[int]) -> Windows:
        """The windows of these samples. torch's DataLoader calls this for a batch."""
        # At a context of 1,024 tokens, the cost of Python per window exceeds that of copying its
        # tokens. Joining slices of memory takes a third of the time of numpy's assignments.
        if self._is_remote:
            for source, shards in self._order.upcoming(max(0, min(indices))):
                self._stores[source].fetch_ahead(shards)
        parts, sources = [], []
        is_first = np.zeros((len(indices), self._context), np.bool_) if self._has_mask else None
        for row, index in enumerate(indices):
            sample = max(index, 0)
            found = self._located.get(sample) or self._locate(indices)[sample]
            source, position, block, first = found
            sources.append(source)
            shard = self._stores[source][position]
            # A replacement may hold fewer blocks than the shard that it replaces.
            block %= len(shard.starts)
            start = shard.starts[block] + first
            if is_first is not None:
                _mark_first(is_first[row], shard.ends[block] if shard.ends else _NO_ENDS, first)
            part = shard.memory[start : start + self._context]
            if self._stores[source].dtype != self._dtype:
                part = shard.tokens[start : start + self._context].astype(self._dtype).data
            parts.append(part)
        tokens = np.frombuffer(b"".join(parts), self._dtype)
        return Windows(
            tokens.reshape(len(indices), -1),  # (b, context)
            indices,
            is_first,
            sources if self._has_names else None,
        )

    def _locate(self, indices: Sequence[int]) -> dict[int, tuple[int, int, int, int]]:
        """(source, shard, block, first token in it) by sample, of this batch and later ones."""
        count = max(1, min(_MOST_LOCATED // len(indices), _MOST_SPAN // self._stride))
        own = np.maximum(np.array(indices), 0)  # (b,)
        # Each batch once: of an order that ends, those after its end do not exist.
        samples = (own + self._stride * np.arange(count)[:, None]).ravel()
        if isinstance(self._order, StoredOrder):
            samples = samples[samples < self._order.samples_per_epoch]
        found = self._order.locate_many(samples)
        parts = found.source, found.shard, found.block, found.window * self._context
        places = zip(*(part.tolist() for part in parts), strict=True)
        self._located = dict(zip(samples.tolist(), places, strict=True))
        return self._located


def _mark_first(is_first: NDArray[np.bool_], ends: Ends, start: int) -> None:
    """Mark the first token of each document in the window of a block from `start` on."""
    is_first[0] = True
    inside = slice(*np.searchsorted(ends, (start, start + is_first.size), side="right"))
    places = ends[inside].astype(np.int64) - start
    is_first[places[places < is_first.size]] = True


class BatchLoader:
    """Batches made from a loader of `Windows`, in the process that iterates.

    Args:
        loader: of the windows.
        bos_id: the id that begins every sequence.
        pin_memory: whether batches are in page-locked memory.
        pieces: into how many equal pieces a sample of some index is cut, the same number for all
            samples of a batch. Each is a sequence of its own. None: samples are not cut.

    A batch holds `input` (b, context), the window shifted right by one with the bos id in front;
    `target` (b, context), the window; and `index` (b,), the indices of the samples. All are int64.
    With a mask there is `is_first` (b, context), bool: whether a token is the first of its
    document. The bos id is in front of each document then. Where sources have names there is
    `source` (b,), int64: the index of each sample's source.
    """

    def __init__(
        self,
        loader: DataLoader[Windows],
        bos_id: int,
        *,
        pin_memory: bool,
        pieces: Callable[[int], int] | None = None,
    ) -> None:
        self._pieces = pieces
        self._loader = loader
        self._bos_id = bos_id
        self._pin_memory = pin_memory
        # Strategies read the batch size from this.
        self.batch_sampler = loader.batch_sampler

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Batch]:
        for windows in self._loader:
            count = 1 if self._pieces is None else self._pieces(windows.indices[0])
            yield self._expand(windows if count == 1 else _cut(windows, count))

    def _expand(self, windows: Windows) -> Batch:
        shape = windows.tokens.shape
        inputs = torch.empty(shape, dtype=torch.int64, pin_memory=self._pin_memory)
        target = torch.empty(shape, dtype=torch.int64, pin_memory=self._pin_memory)
        # numpy converts to int64 faster than torch, which has no arithmetic for unsigned types.
        inputs.numpy()[:, 0] = self._bos_id
        inputs.numpy()[:, 1:] = windows.tokens[:, :-1]
        target.numpy()[:] = windows.tokens
        index = torch.tensor(windows.indices, dtype=torch.int64)
        batch = {"input": inputs, "target": target, "index": index}
        if windows.is_first is not None:
            inputs.numpy()[windows.is_first] = self._bos_id
            is_first = torch.empty(shape, dtype=torch.bool, pin_memory=self._pin_memory)
            is_first.numpy()[:] = windows.is_first
            batch["is_first"] = is_first
        if windows.sources is not None:
            batch["source"] = torch.tensor(windows.sources, dtype=torch.int64)
        return batch


def _cut(windows: Windows, count: int) -> Windows:
    """The windows cut into `count` equal pieces each, which are sequences of their own."""
    rows = len(windows.indices) * count
    is_first, sources = windows.is_first, windows.sources
    if is_first is not None:
        is_first = is_first.reshape(rows, -1).copy()  # a worker's may not be written to
        is_first[:, 0] = True
    return Windows(
        windows.tokens.reshape(rows, -1),
        np.repeat(windows.indices, count).tolist(),
        is_first,
        None if sources is None else np.repeat(sources, count).tolist(),
    )


class RankBatches(Sampler[Sequence[int]]):
    """The micro-batches of one rank, in order.

    With S = `samples_per_update`, update u consumes the samples [u * S, (u + 1) * S). In micro-step
    m of the update, rank r of R takes the b = `micro_batch` samples from u * S + m * R * b + r * b
    on. So an update consumes the same samples on any number of ranks.
    """

    def __init__(
        self,
        *,
        first_sample: int,
        num_samples: int | None,
        samples_per_update: int,
        micro_batch: int,
        rank: int,
        world_size: int,
    ) -> None:
        self._first_sample = first_sample
        self._num_samples = num_samples
        self.stride = micro_batch * world_size
        self._offset = micro_batch * rank
        self.batch_size = micro_batch
        if samples_per_update < 1 or samples_per_update % self.stride:
            raise ValueError(
                f"samples_per_update: {samples_per_update} is no multiple of micro-batch "
                f"{micro_batch} times {world_size} ranks = {self.stride}"
            )
        for name, value in (("first_sample", first_sample), ("num_samples", num_samples or 0)):
            if value < 0 or value % samples_per_update:
                raise ValueError(
                    f"{name}: {value} is no multiple of {samples_per_update} an update"
                )

    def __len__(self) -> int:
        if self._num_samples is None:
            raise TypeError("the stream of batches has no end")
        return self._num_samples // self.stride

    def __iter__(self) -> Iterator[Sequence[int]]:
        steps = itertools.count() if self._num_samples is None else range(len(self))
        for step in steps:
            start = self._first_sample + step * self.stride + self._offset
            yield range(start, start + self.batch_size)


class ValidationBatches(Sampler[Sequence[int]]):
    """The first `num_samples` samples, divided among ranks into equally many, full batches.

    Batches are filled up with `PADDING_INDEX`.
    """

    def __init__(self, *, num_samples: int, micro_batch: int, rank: int, world_size: int) -> None:
        self._own = list(range(rank, num_samples, world_size))
        self.stride = micro_batch * world_size
        self.batch_size = micro_batch
        per_rank = -(-num_samples // world_size)
        self._count = -(-per_rank // micro_batch)
        self._own += [PADDING_INDEX] * (self._count * micro_batch - len(self._own))

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence[int]]:
        for start in range(0, len(self._own), self.batch_size):
            yield self._own[start : start + self.batch_size]
