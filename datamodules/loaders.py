"""Shard stores and data loaders from a DataConfig, with or without a trainer."""

from typing import cast

import torch
from torch.utils.data import DataLoader, Sampler

from longhaul.datamodules.config import DataConfig
from longhaul.datamodules.manifest import Manifest, load_manifest
from longhaul.datamodules.order import DocumentOrder, SampleOrder
from longhaul.datamodules.store import ShardStore
from longhaul.datamodules.stream import (
    BatchLoader,
    RankBatches,
    TokenWindows,
    ValidationBatches,
    Windows,
)
from longhaul.datamodules.workers import WorkerLoader, unchanged


def open_store(config: DataConfig, manifest: Manifest) -> ShardStore:
    """The shards of a manifest, with as many kept open as training needs."""
    return ShardStore(
        manifest,
        cache_dir=config.cache_dir,
        replaces_bad=config.on_bad_shard == "replace",
        max_bad_fraction=config.max_bad_fraction,
        # At the end of a shuffled block of shards, the next block is read too.
        keep_open=2 * config.shuffle_shards,
    )


def make_loader(
    config: DataConfig,
    store: ShardStore,
    order: SampleOrder | DocumentOrder,
    batches: RankBatches | ValidationBatches,
    *,
    pin_memory: bool = False,
) -> BatchLoader:
    """Batches of windows, read ahead by worker processes, which take turns."""
    dataset = TokenWindows(store, order, config.context, batches.stride * max(1, config.workers))
    loader: DataLoader[Windows]
    if config.workers:
        loader = WorkerLoader(dataset, batches, config.workers, store.manifest.location)
    else:
        loader = DataLoader(
            dataset,
            # torch's annotation demands lists, but it passes on whatever the sampler yields.
            batch_sampler=cast(Sampler[list[int]], batches),
            collate_fn=unchanged,
            generator=torch.Generator(),  # as WorkerLoader does, and for the same reason
        )
    return BatchLoader(loader, store.manifest.bos_id, pin_memory=pin_memory)


class HeldOut:
    """The validation samples of a run.

    Raises:
        ValueError: if the manifest cannot be read, or its tokenizer differs from that of the
            training shards.
    """

    def __init__(self, config: DataConfig, train: Manifest, location: str) -> None:
        self._config = config
        self.manifest = load_manifest(location)
        _check_same_tokenizer(train, self.manifest)
        self._store = open_store(config, self.manifest)

    def check_present(self) -> None:
        """Raise ShardError if a local shard is missing."""
        self._store.check_present()

    def loader(
        self, micro_batch: int, rank: int = 0, world_size: int = 1, *, pin_memory: bool = False
    ) -> BatchLoader:
        """Batches of this rank's share of the samples."""
        order = DocumentOrder(self.manifest, self._config.context)
        samples = max(1, self._config.validation_tokens // self._config.context)
        batches = ValidationBatches(
            num_samples=min(samples, order.samples_per_epoch),
            micro_batch=micro_batch,
            rank=rank,
            world_size=world_size,
        )
        return make_loader(self._config, self._store, order, batches, pin_memory=pin_memory)


def _check_same_tokenizer(train: Manifest, validation: Manifest) -> None:
    for key in ("tokenizer_sha256", "vocab_size", "bos_id"):
        if getattr(train, key) != getattr(validation, key):
            (name, theirs), (_, ours) = validation.shown(key), train.shown(key)
            raise ValueError(
                f"data.validation_manifest: {name} is {theirs} in {validation.location}, "
                f"wanted {ours} as in {train.location}"
            )
