"""Shard stores and data loaders from a DataConfig, with or without a trainer."""

import atexit
import os
import signal
from collections.abc import Sequence
from functools import cache, partial
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Sampler

from longhaul.datamodules.config import DataConfig
from longhaul.datamodules.manifest import Manifest, load_manifest
from longhaul.datamodules.order import DocumentOrder
from longhaul.datamodules.store import ShardStore
from longhaul.datamodules.stream import BatchLoader, TokenWindows, ValidationBatches

_PREFETCH_BATCHES = 4


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
    dataset: TokenWindows,
    batches: Sampler[Sequence[int]],
    manifest: Manifest,
    *,
    pin_memory: bool = False,
) -> BatchLoader:
    """Batches of windows, read ahead by worker processes."""
    workers = config.workers
    loader = DataLoader(
        dataset,
        # torch's annotation demands lists, but it passes on whatever the sampler yields.
        batch_sampler=cast(Sampler[list[int]], batches),
        collate_fn=_unchanged,
        num_workers=workers,
        persistent_workers=workers > 0,
        prefetch_factor=_PREFETCH_BATCHES if workers else None,
        worker_init_fn=partial(_leave_signals_to_trainer, _exit_flag()),
    )
    return BatchLoader(loader, manifest.bos_id, pin_memory=pin_memory)


class HeldOut:
    """The validation samples of a run.

    Raises:
        ValueError: if the manifest cannot be read, or its tokenizer differs from that of the
            training shards.
    """

    def __init__(self, config: DataConfig, train: Manifest, location: str) -> None:
        self._config = config
        self._manifest = load_manifest(location)
        _check_same_tokenizer(train, self._manifest)
        self._store = open_store(config, self._manifest)

    def loader(
        self, micro_batch: int, rank: int = 0, world_size: int = 1, *, pin_memory: bool = False
    ) -> BatchLoader:
        """Batches of this rank's share of the samples."""
        order = DocumentOrder(self._manifest, self._config.context)
        samples = max(1, self._config.validation_tokens // self._config.context)
        batches = ValidationBatches(
            num_samples=min(samples, order.samples_per_epoch),
            micro_batch=micro_batch,
            rank=rank,
            world_size=world_size,
        )
        dataset = TokenWindows(self._store, order, self._config.context)
        return make_loader(self._config, dataset, batches, self._manifest, pin_memory=pin_memory)


@cache
def _exit_flag() -> torch.Tensor:
    """A flag in shared memory that becomes 1 when this process exits."""
    is_exiting = torch.zeros(1, dtype=torch.uint8)
    is_exiting.share_memory_()
    atexit.register(is_exiting.fill_, 1)
    return is_exiting


def _unchanged(batch: Any) -> Any:
    return batch


def _leave_signals_to_trainer(is_exiting: torch.Tensor, worker: int) -> None:
    """Ignore signals in a worker: the training process reacts to them and ends its workers."""
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)

    def end_with_trainer(number: int, frame: object) -> None:
        # When the trainer exits, multiprocessing sends this signal to its remaining children and
        # waits for them without limit. Ignoring the signal then would hang the exit.
        if is_exiting.item():
            os._exit(0)

    signal.signal(signal.SIGTERM, end_with_trainer)


def _check_same_tokenizer(train: Manifest, validation: Manifest) -> None:
    for name in ("tokenizer_sha256", "vocab_size", "bos_id"):
        ours, theirs = getattr(train, name), getattr(validation, name)
        if ours != theirs:
            raise ValueError(
                f"data.validation_manifest: {name} is {theirs} in {validation.location}, "
                f"wanted {ours} as in {train.location}"
            )
