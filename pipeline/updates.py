"""What happens after each update: record, validate, save, show; and how a run is picked up."""

import dataclasses
import hashlib
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from longhaul.configs import RunConfig
from longhaul.datamodules.tokens import TokenDataModule
from longhaul.modules.pretraining import Pretraining, Progress, Update
from longhaul.pipeline.checkpoint import CheckpointError, CheckpointStore, Saved
from longhaul.pipeline.evaluation.positions import measure_positions, summarise
from longhaul.pipeline.rng import capture_rng, restore_rng
from longhaul.pipeline.run_folder import RunFolder
from longhaul.pipeline.show import ProgressLine
from longhaul.pipeline.strategies import resumable
from longhaul.pipeline.tracking import Tracker


@dataclass(frozen=True)
class Books:
    """Where rank 0 writes down how the run goes."""

    tracker: Tracker
    show: ProgressLine


class Updates(Callback):
    """Restores the newest checkpoint at the start, and keeps the books of every update.

    The run's own counters (Pretraining.progress) are the only position there is: Lightning's are
    those of this process and mean nothing after a restart.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        data: TokenDataModule,
        books: Books | None,
    ) -> None:
        """`books` belong to rank 0; the other ranks pass None."""
        self.config = config
        self.data = data
        self.books = books
        self._validation_batches = data.val_dataloader()
        self.checkpoint_updates = max(
            1, config.checkpoint.every_tokens // config.optim.tokens_per_update
        )
        self.validation_updates = max(
            1, config.trainer.validate_every_tokens // config.optim.tokens_per_update
        )
        self._folder = folder
        self.store: CheckpointStore
        self._update_began = 0.0
        self._idle_since = 0.0
        self._data_wait = 0.0
        self._unlogged: tuple[Path, int] | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore model, optimiser, counters and RNG before the loader is built."""
        module = _pretraining(pl_module)
        config = self.config.checkpoint
        # Only now are there groups of ranks.
        group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self.store = CheckpointStore(
            self._folder.checkpoints,
            keep_last=config.keep_last,
            keep_every=config.keep_every and config.keep_every * self.checkpoint_updates,
            group=group,
        )
        path = trainer.strategy.broadcast(self.store.newest() if trainer.is_global_zero else None)
        if path is None and any(self.store.folder.glob("*.damaged")):
            raise CheckpointError(
                f"{self.store.folder}: found damaged checkpoints alone, wanted a whole one; "
                "to start over, give the run another name or remove its folder"
            )
        if path is not None:
            self._restore(trainer, module, Saved(path, rank_group=group))
        total = self.config.num_updates * self.config.samples_per_update
        self.data.start_at(module.progress.samples, max(0, total - module.progress.samples))
        if self.books:
            self.books.show.begin(module.progress)
            if path is not None:  # killed right after the save, MLflow may not know it yet
                self.books.tracker.log_checkpoint(path, module.progress.step)

    def _restore(self, trainer: Trainer, module: Pretraining, saved: Saved) -> None:
        resumable(trainer).restore(module.model, trainer.optimizers[0], saved)
        restore_rng(saved.read_group("rng"))
        module.progress = Progress(**saved.state["progress"])
        self._check_same_data(saved.state["shards_sha256"])

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._idle_since = self._update_began = time.perf_counter()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._data_wait += time.perf_counter() - self._idle_since

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        module = _pretraining(pl_module)
        if module.last_update is not None:
            self._after_update(trainer, module, module.last_update)
        self._idle_since = time.perf_counter()

    def _after_update(self, trainer: Trainer, module: Pretraining, update: Update) -> None:
        progress = module.progress
        is_last = progress.step >= self.config.num_updates
        self._record(progress, update)
        if is_last or progress.step % self.validation_updates == 0:
            self._validate(module)
        if is_last or progress.step % self.checkpoint_updates == 0:
            self._save(trainer, module)
        if is_last:
            self._finish_save()
        # Validation and saving are not part of the next update's time.
        self._update_began = time.perf_counter()
        self._data_wait = 0.0

    def _record(self, progress: Progress, update: Update) -> None:
        if self.books is None:
            return
        seconds = time.perf_counter() - self._update_began
        tokens_per_second = self.config.optim.tokens_per_update / seconds
        self.books.show.update(progress, update, tokens_per_second)
        every = self.config.tracking.every_updates
        if progress.step % every and progress.step < self.config.num_updates:
            return
        values = {
            "train/loss": update.loss,
            "train/gradient_norm": update.gradient_norm,
            "train/learning_rate": update.learning_rate,
            "train/tokens": progress.tokens,
            "train/skipped_updates": progress.skipped_updates,
            "train/tokens_per_second": tokens_per_second,
            "train/step_seconds": seconds,
            "train/data_wait_seconds": self._data_wait,
            "train/peak_memory_bytes": _peak_memory(),
            "train/replaced_shards": len(self.data.bad_shards),
        }
        self.books.tracker.log("train", progress.step, values)

    def _validate(self, module: Pretraining) -> None:
        if self.data.validation_manifest is None:
            return
        metric = measure_positions(
            module.model,
            self._validation_batches,
            self.config.data.context,
            module.device,
            self.config.trainer.precision,
        )
        values = summarise(metric.compute()[0], "validation")
        if self.books is not None:
            self.books.tracker.log("validation", module.progress.step, values)
            self.books.show.validation(module.progress, values["validation/loss"])

    def _save(self, trainer: Trainer, module: Pretraining) -> None:
        """Begin a checkpoint, which the ranks write while they go on."""
        self._finish_save()
        tensors = resumable(trainer).tensors(module.model, trainer.optimizers[0])
        if self.books is not None:
            # A checkpoint must never know more than the journal: a resumed run would not log again
            # what the journal lost.
            self.books.tracker.sync()
            tensors |= {f"rng/{name}": tensor for name, tensor in capture_rng().items()}
        path = self.store.start(
            module.progress.step,
            tensors,
            {
                "progress": dataclasses.asdict(module.progress),
                "shards_sha256": self._shards_sha256(),
                "mlflow_run_id": self.books.tracker.run_id if self.books else None,
            },
        )
        self._unlogged = path, module.progress.step

    def _finish_save(self) -> None:
        """Wait for the checkpoint that is being written; CheckpointError if it failed."""
        self.store.wait()
        if self.books is not None and self._unlogged is not None:
            self.books.tracker.log_checkpoint(*self._unlogged)
        self._unlogged = None

    def _shards_sha256(self) -> str:
        shards = "".join(shard.sha256 for shard in self.data.manifest.shards)
        return hashlib.sha256(shards.encode()).hexdigest()

    def _check_same_data(self, shards_sha256: str) -> None:
        if shards_sha256 != self._shards_sha256():
            raise ValueError(
                f"data.manifest: found other shards in {self.config.data.manifest} than this run "
                "was trained on, wanted the same ones"
            )


def _pretraining(module: LightningModule) -> Pretraining:
    assert isinstance(module, Pretraining)
    return module


def _peak_memory() -> float:
    """High-water mark of this process: of the device where there is one, else of main memory."""
    if torch.cuda.is_available():
        return float(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
