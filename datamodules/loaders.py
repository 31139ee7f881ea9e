"""Shard stores and data loaders from a DataConfig, with or without a trainer."""

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch.utils.data import DataLoader, Sampler

from longhaul.datamodules.config import DataConfig, key_of
from longhaul.datamodules.corpus import Corpus, corpus_of
from longhaul.datamodules.mixture import Order
from longhaul.datamodules.store import ShardStore
from longhaul.datamodules.stream import (
    BatchLoader,
    RankBatches,
    TokenWindows,
    ValidationBatches,
    Windows,
)
from longhaul.datamodules.urls import is_remote
from longhaul.datamodules.workers import WorkerLoader, unchanged


def open_stores(config: DataConfig, corpus: Corpus) -> tuple[ShardStore, ...]:
    """The shards of each source of a corpus, with as many kept open as training needs.

    Raises ValueError if `cache_bytes` does not hold the shards that one rank reads at a time.
    """
    _check_cache(config, corpus)
    return tuple(
        ShardStore(
            source,
            cache_dir=config.cache_dir,
            cache_bytes=config.cache_bytes,
            replaces_bad=config.on_bad_shard == "replace",
            max_bad_fraction=config.max_bad_fraction,
            # At the end of a shuffled group of shards, the next group is read too.
            keep_open=2 * config.shuffle_shards,
        )
        for source in corpus.sources
    )


def _check_cache(config: DataConfig, corpus: Corpus) -> None:
    # The group that is read, and the next, which is fetched. A worker ahead of the others may read
    # one shard more, and have one more fetched.
    count = 2 * config.shuffle_shards + 2 * config.workers
    sizes = [
        sorted((shard.bytes for shard in source.shards), reverse=True)[:count]
        for source in corpus.sources
        if is_remote(source.location)
    ]
    needed = sum(map(sum, sizes))
    if config.cache_bytes is not None and config.cache_bytes < needed:
        raise ValueError(
            f"data.cache_bytes: found {config.cache_bytes:,}, wanted {needed:,} or more for each "
            f"rank of a node, for {sum(map(len, sizes))} shards: 2 * data.shuffle_shards + "
            "2 * data.workers of each source, the largest ones"
        )


def make_loader(
    config: DataConfig,
    corpus: Corpus,
    stores: Sequence[ShardStore],
    order: Order,
    batches: RankBatches | ValidationBatches,
    *,
    pin_memory: bool = False,
    pieces: Callable[[int], int] | None = None,
) -> BatchLoader:
    """Batches of windows, read ahead by worker processes, which take turns.

    `pieces` is as in BatchLoader.
    """
    dataset = TokenWindows(
        stores,
        order,
        config.context,
        batches.stride * max(1, config.workers),
        has_mask=config.document_mask and corpus.has_ends,
        has_names=corpus.has_names,
    )
    loader: DataLoader[Windows]
    if config.workers:
        loader = WorkerLoader(
            dataset, batches, config.workers, corpus.location, is_remote=corpus.is_remote
        )
    else:
        loader = DataLoader(
            dataset,
            # torch's annotation demands lists, but it passes on whatever the sampler yields.
            batch_sampler=cast(Sampler[list[int]], batches),
            collate_fn=unchanged,
            generator=torch.Generator(),  # as WorkerLoader does, and for the same reason
        )
    return BatchLoader(loader, corpus.bos_id, pin_memory=pin_memory, pieces=pieces)


class HeldOut:
    """The validation samples of a run.

    Raises:
        ValueError: if they cannot be read, or their tokenizer differs from that of the
            training shards.
    """

    def __init__(self, config: DataConfig, train: Corpus) -> None:
        self._config = config
        self.corpus = corpus_of(config, "validation_manifest")
        if difference := self.corpus.ids_differ(train):
            raise ValueError(f"{key_of(self.corpus.names[0], 'validation_manifest')}: {difference}")
        self._stores = open_stores(config, self.corpus)

    def check_present(self) -> None:
        """Raise ShardError if a local shard is missing."""
        for store in self._stores:
            store.check_present()

    def loader(
        self, micro_batch: int, rank: int = 0, world_size: int = 1, *, pin_memory: bool = False
    ) -> BatchLoader:
        """Batches of this rank's share of the samples."""
        samples = max(1, self._config.validation_tokens // self._config.context)
        order = self.corpus.stored_order(self._config.context, samples)
        batches = ValidationBatches(
            num_samples=order.samples_per_epoch,
            micro_batch=micro_batch,
            rank=rank,
            world_size=world_size,
        )
        return make_loader(
            self._config, self.corpus, self._stores, order, batches, pin_memory=pin_memory
        )
