"""Windows of tokens by their place in the order, and which of them a rank takes."""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from longhaul.datamodules.order import DocumentOrder, SampleOrder
from longhaul.datamodules.store import ShardStore

# Samples located at a time: numpy's cost per call is that of some hundred samples.
_TABLE_SAMPLES = 4096
PADDING_INDEX = -1

Batch = dict[str, Tensor]


class TokenWindows(Dataset[Batch]):
    """Training samples by global index; a list of indices gives a batch, already collated.

    A batch holds `input` (b, context), the window rolled right by one with the bos id in front;
    `target` (b, context), the window; `index` (b,), the indices asked for; all int64.
    `PADDING_INDEX` gives the tokens of sample 0 under its own index.
    """

    def __init__(self, store: ShardStore, order: SampleOrder | DocumentOrder, context: int) -> None:
        self._store = store
        self._order = order
        self._context = context
        self._bos_id = store.manifest.bos_id
        self._tables: dict[int, list[tuple[int, int, int]]] = {}

    def __getitem__(self, index: int) -> Batch:
        """One sample, without the leading dimension."""
        return {name: tensor[0] for name, tensor in self.__getitems__([index]).items()}

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """The samples of these indices as one batch; torch's loader fetches through this."""
        size = self._context
        inputs = np.empty((len(indices), size), np.int64)  # (b, context)
        targets = np.empty((len(indices), size), np.int64)  # (b, context)
        for row, index in enumerate(indices):
            shard_position, document, first = self._locate(max(index, 0))
            shard = self._store[shard_position]
            # A replacement may hold fewer documents than the shard it stands for.
            start = shard.starts[document % len(shard.starts)] + first
            targets[row] = shard.tokens[start : start + size]
        inputs[:, 0] = self._bos_id
        inputs[:, 1:] = targets[:, :-1]
        return {
            "input": torch.from_numpy(inputs),
            "target": torch.from_numpy(targets),
            "index": torch.tensor(indices, dtype=torch.int64),
        }

    def _locate(self, index: int) -> tuple[int, int, int]:
        """Shard, document, and first token within the document."""
        block, place = divmod(index, _TABLE_SAMPLES)
        table = self._tables.get(block)
        if table is None:
            first = block * _TABLE_SAMPLES
            last = first + _TABLE_SAMPLES
            if isinstance(self._order, DocumentOrder):
                last = min(last, self._order.samples_per_epoch)
            found = self._order.locate_many(np.arange(first, last))
            starts = found.window * self._context
            table = list(
                zip(found.shard.tolist(), found.document.tolist(), starts.tolist(), strict=True)
            )
            # The order is read forwards: of earlier tables only the last may be asked for again.
            self._tables = {b: t for b, t in self._tables.items() if b == block - 1}
            self._tables[block] = table
        return table[place]


class RankBatches(Sampler[Sequence[int]]):
    """Micro-batches of one rank, in order.

    Update u consumes samples [u * S, (u + 1) * S) with S = `samples_per_update`; in its micro-step
    m, rank r of R takes the `micro_batch` = b samples from u * S + m * R * b + r * b. So what an
    update consumes is the same on any number of ranks.
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
        self._stride = micro_batch * world_size
        self._offset = micro_batch * rank
        self.batch_size = micro_batch
        _check_divides(samples_per_update, micro_batch, world_size, first_sample, num_samples)

    def __len__(self) -> int:
        if self._num_samples is None:
            raise TypeError("the stream of batches has no end")
        return self._num_samples // self._stride

    def __iter__(self) -> Iterator[Sequence[int]]:
        steps = itertools.count() if self._num_samples is None else range(len(self))
        for step in steps:
            start = self._first_sample + step * self._stride + self._offset
            yield range(start, start + self.batch_size)


def _check_divides(
    samples_per_update: int,
    micro_batch: int,
    world_size: int,
    first_sample: int,
    num_samples: int | None,
) -> None:
    if samples_per_update < 1 or samples_per_update % (micro_batch * world_size):
        raise ValueError(
            f"samples_per_update: {samples_per_update} is no multiple of micro-batch {micro_batch} "
            f"times {world_size} ranks = {micro_batch * world_size}"
        )
    for name, value in (("first_sample", first_sample), ("num_samples", num_samples or 0)):
        if value < 0 or value % samples_per_update:
            raise ValueError(f"{name}: {value} is no multiple of {samples_per_update} an update")


class ValidationBatches(Sampler[Sequence[int]]):
    """The first `num_samples` samples, dealt out to ranks; all get as many batches, all full."""

    def __init__(self, *, num_samples: int, micro_batch: int, rank: int, world_size: int) -> None:
        self._own = list(range(rank, num_samples, world_size))
        self.batch_size = micro_batch
        per_rank = -(-num_samples // world_size)
        self._count = -(-per_rank // micro_batch)
        self._own += [PADDING_INDEX] * (self._count * micro_batch - len(self._own))

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence[int]]:
        for start in range(0, len(self._own), self.batch_size):
            yield self._own[start : start + self.batch_size]
