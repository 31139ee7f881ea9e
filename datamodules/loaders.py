"""Shard stores and data loaders from a DataConfig, with or without a trainer."""

import atexit
import logging
import os
import signal
import time
from collections.abc import Sequence
from functools import cache, partial
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Sampler
from torch.utils.data._utils.signal_handling import _remove_worker_pids  # type: ignore[attr-defined]

from longhaul.datamodules.config import DataConfig
from longhaul.datamodules.manifest import Manifest, load_manifest
from longhaul.datamodules.order import DocumentOrder
from longhaul.datamodules.store import ShardStore
from longhaul.datamodules.stream import BatchLoader, TokenWindows, ValidationBatches, Windows

logger = logging.getLogger(__name__)

_PREFETCH_BATCHES = 4
# Of a first start of workers, a second, and a third.
_SECONDS_TO_START = (5.0, 20.0, 60.0)


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
    # In shared memory: each worker sets its entry to 1.
    has_started = torch.zeros(workers, dtype=torch.uint8).share_memory_()
    loader = _Loader(
        dataset,
        # torch's annotation demands lists, but it passes on whatever the sampler yields.
        batch_sampler=cast(Sampler[list[int]], batches),
        collate_fn=_unchanged,
        # A loader draws a seed for its workers, which use none. With torch's own generator, a
        # resumed run, which makes one more loader, would not have the state of one that was not
        # stopped.
        generator=torch.Generator(),
        num_workers=workers,
        persistent_workers=workers > 0,
        prefetch_factor=_PREFETCH_BATCHES if workers else None,
        worker_init_fn=partial(_begin_worker, _exit_flag(), has_started),
    )
    loader.has_started = has_started
    return BatchLoader(loader, manifest.bos_id, pin_memory=pin_memory)


class _Loader(DataLoader[Windows]):
    """A DataLoader that starts its workers again if one of them hangs in its first moment.

    In Python 3.11 a forked process takes a lock of the interpreter before it makes that lock anew.
    It hangs for ever if another thread held the lock at the moment of the fork. That was seen with
    two ranks under ddp; which thread held the lock was not.
    """

    has_started: torch.Tensor

    def _get_iterator(self) -> Any:
        for seconds in _SECONDS_TO_START:
            self.has_started.zero_()
            iterator: Any = super()._get_iterator()
            deadline = time.monotonic() + seconds
            while not self.has_started.all():
                if time.monotonic() > deadline:
                    break
                time.sleep(0.001)
            else:
                return iterator
            logger.warning("data.workers: not started within %.0f s, starting again", seconds)
            # They are not to be reported as killed.
            _remove_worker_pids(id(iterator))
            iterator._worker_pids_set = False
            for worker in iterator._workers:
                worker.kill()
            iterator._shutdown_workers()
        raise RuntimeError(
            f"data.workers: found workers that hang at each of {len(_SECONDS_TO_START)} starts, "
            f"wanted {self.num_workers} that read; data.workers=0 reads in the training process"
        )


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
        dataset = TokenWindows(self._store, order, self._config.context)
        return make_loader(self._config, dataset, batches, self.manifest, pin_memory=pin_memory)


@cache
def _exit_flag() -> torch.Tensor:
    """A flag in shared memory that becomes 1 when this process exits."""
    is_exiting = torch.zeros(1, dtype=torch.uint8)
    is_exiting.share_memory_()
    atexit.register(is_exiting.fill_, 1)
    return is_exiting


def _unchanged(batch: Any) -> Any:
    return batch


def _begin_worker(is_exiting: torch.Tensor, has_started: torch.Tensor, worker: int) -> None:
    """Ignore signals in a worker: the training process reacts to them and ends its workers."""
    has_started[worker] = 1
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
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
