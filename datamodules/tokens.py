"""The LightningDataModule: token windows for one rank, at any position, on any number of ranks."""

import atexit
import os
import signal
from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import Any, cast

import torch
from lightning import LightningDataModule
from torch.utils.data import DataLoader, Sampler

from longhaul.datamodules.config import DataConfig
from longhaul.datamodules.manifest import Manifest, load_manifest
from longhaul.datamodules.order import DocumentOrder, SampleOrder
from longhaul.datamodules.shards import Shard
from longhaul.datamodules.store import ShardStore
from longhaul.datamodules.stream import (
    Batch,
    BatchLoader,
    RankBatches,
    TokenWindows,
    ValidationBatches,
)

_PREFETCH_BATCHES = 4


class TokenDataModule(LightningDataModule):
    """Serves one rank its micro-batches from `first_sample` on, and its part of the validation.

    The loaders hold no position worth saving. To go on, on any number of ranks and workers, takes
    only the count of samples consumed so far, which the trainer keeps.

    Args:
        config: what is read, and how.
        seed: of the order of samples.
        samples_per_update: samples that all ranks together consume per optimizer update.
        micro_batch: samples per batch.
        rank, world_size: of all ranks.
        ranks_a_sample: ranks in a row that train on the same samples.
        first_sample: global index to start from, a multiple of `samples_per_update`.
        num_samples: samples that all ranks together consume from there on; None is without end.
        pin_memory: batches come in page-locked memory.

    Raises:
        ValueError: bad sizes, a manifest that cannot be read, tokenizers that differ.
    """

    def __init__(
        self,
        config: DataConfig,
        *,
        seed: int,
        samples_per_update: int,
        micro_batch: int,
        rank: int,
        world_size: int,
        ranks_a_sample: int = 1,
        first_sample: int = 0,
        num_samples: int | None = None,
        pin_memory: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self._micro_batch = micro_batch
        self._rank = rank
        self._world_size = world_size
        self._ranks_a_sample = ranks_a_sample
        self._pin_memory = pin_memory
        self._samples_per_update = samples_per_update
        self.start_at(first_sample, num_samples)
        self.manifest: Manifest = load_manifest(config.manifest)
        self.order = SampleOrder(self.manifest, config.context, seed, config.shuffle_shards)
        self._store = self._open_store(self.manifest)
        self.validation_manifest: Manifest | None = None
        if config.validation_manifest is not None:
            self.validation_manifest = load_manifest(config.validation_manifest)
            _check_same_tokenizer(self.manifest, self.validation_manifest)
            self._validation_store = self._open_store(self.validation_manifest)

    def start_at(self, first_sample: int, num_samples: int | None) -> None:
        """Where the next training loader begins, and how many samples it serves."""
        self._batches = RankBatches(
            first_sample=first_sample,
            num_samples=num_samples,
            samples_per_update=self._samples_per_update,
            micro_batch=self._micro_batch,
            rank=self._rank // self._ranks_a_sample,
            world_size=self._world_size // self._ranks_a_sample,
        )

    def training_shards(self) -> Iterator[Shard]:
        """All training shards in the manifest's order, one open at a time."""
        return (self._store[position] for position in range(len(self.manifest.shards)))

    @property
    def bad_shards(self) -> tuple[str, ...]:
        """Names of the training shards this rank replaced so far; grows as the loader is read."""
        return self._store.bad_shards

    def train_dataloader(self) -> BatchLoader:
        """This rank's micro-batches, from `first_sample` on."""
        dataset = TokenWindows(self._store, self.order, self.config.context)
        return self._loader(dataset, self._batches, self.manifest)

    def val_dataloader(self) -> BatchLoader | list[Batch]:
        """This rank's share of the validation samples; an empty list where there are none."""
        if self.validation_manifest is None:
            return []
        order = DocumentOrder(self.validation_manifest, self.config.context)
        samples = max(1, self.config.validation_tokens // self.config.context)
        batches = ValidationBatches(
            num_samples=min(samples, order.samples_per_epoch),
            micro_batch=self._micro_batch,
            rank=self._rank,
            world_size=self._world_size,
        )
        dataset = TokenWindows(self._validation_store, order, self.config.context)
        return self._loader(dataset, batches, self.validation_manifest)

    def _open_store(self, manifest: Manifest) -> ShardStore:
        return ShardStore(
            manifest,
            cache_dir=self.config.cache_dir,
            replaces_bad=self.config.on_bad_shard == "replace",
            max_bad_fraction=self.config.max_bad_fraction,
            # Around the end of a block, windows of the next one are read too.
            keep_open=2 * self.config.shuffle_shards,
        )

    def _loader(
        self, dataset: TokenWindows, batches: Sampler[Sequence[int]], manifest: Manifest
    ) -> BatchLoader:
        workers = self.config.workers
        loader = DataLoader(
            dataset,
            # torch's annotation wants lists; it hands on whatever the sampler yields.
            batch_sampler=cast(Sampler[list[int]], batches),
            collate_fn=_as_it_is,
            num_workers=workers,
            persistent_workers=workers > 0,
            prefetch_factor=_PREFETCH_BATCHES if workers else None,
            worker_init_fn=partial(_leave_signals_to_trainer, _exit_flag()),
        )
        return BatchLoader(loader, manifest.bos_id, pin_memory=self._pin_memory)


@cache
def _exit_flag() -> torch.Tensor:
    """Becomes 1 for all workers when this process exits."""
    is_exiting = torch.zeros(1, dtype=torch.uint8)
    is_exiting.share_memory_()
    atexit.register(is_exiting.fill_, 1)
    return is_exiting


def _as_it_is(batch: Any) -> Any:
    return batch


def _leave_signals_to_trainer(is_exiting: torch.Tensor, worker: int) -> None:
    """In a worker: only the training process reacts to signals, and ends its workers when ready."""
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)

    def end_with_trainer(number: int, frame: object) -> None:
        # multiprocessing ends what is left of its children with this signal when the trainer exits,
        # then waits for them without limit: ignoring the signal then would hang the exit.
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
