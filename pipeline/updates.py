"""What happens after each update: record, validate, save, show; and how a run is picked up."""

import dataclasses
import hashlib
import logging
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from longhaul.configs import RunConfig
from longhaul.datamodules.tokens import TokenDataModule
from longhaul.modules.pretraining import Pretraining, Progress, Update
from longhaul.pipeline.checkpoint import CheckpointError, CheckpointStore, Saved
from longhaul.pipeline.context_parallel import ContextParallel
from longhaul.pipeline.evaluation.positions import measure_positions, summarise
from longhaul.pipeline.hardware import peak_flops
from longhaul.pipeline.mlflow_names import one_line
from longhaul.pipeline.rng import capture_rng, restore_rng
from longhaul.pipeline.run_folder import RunFolder
from longhaul.pipeline.show import ProgressLine
from longhaul.pipeline.stop import StopRequests
from longhaul.pipeline.strategies import resumable
from longhaul.pipeline.tracking import Tracker
from longhaul.pipeline.watchdog import Watchdog

logger = logging.getLogger(__name__)

_SECONDS_FOR_LAST_WORDS = 10.0


@dataclass(frozen=True)
class Books:
    """Where rank 0 writes down how the run goes."""

    tracker: Tracker
    show: ProgressLine

    def give_up(self) -> None:
        """Say in MLflow that the run failed, when the process is about to be ended."""
        self.tracker.finish("FAILED", timeout_s=_SECONDS_FOR_LAST_WORDS)


class RankReport(NamedTuple):
    """What a rank tells the others after an update; numbers, so that a tensor can carry it."""

    seconds: float  # the update took
    data_wait: float  # of them, for the loader
    peak_bytes: float
    wants_stop: float
    wants_save: float
    has_failed_save: float


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
        requests: StopRequests,
        books: Books | None,
    ) -> None:
        """`books` belong to rank 0; the other ranks pass None."""
        self.config = config
        self.data = data
        self.requests = requests
        self.books = books
        self.is_stopped = False
        self.watchdog: Watchdog | None = None
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
        self._step = 0
        self._parts: ContextParallel | None = None
        self._full_speed: float | None = None  # tokens/s of all devices at their peak

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore model, optimiser, counters and RNG before the loader is built."""
        module = _pretraining(pl_module)
        config = self.config.checkpoint
        # Only now are there groups of ranks. Saves talk while training does: they have their own.
        group, self._group = (
            dist.new_group(backend="gloo") if dist.is_initialized() else None for _ in range(2)
        )
        self.watchdog = Watchdog(
            trainer.global_rank,
            trainer.world_size,
            self.config.trainer.hang_seconds,
            self.books.give_up if self.books else lambda: None,
        )
        self.store = CheckpointStore(
            self._folder.checkpoints,
            keep_last=config.keep_last,
            keep_every=config.keep_every and config.keep_every * self.checkpoint_updates,
            group=group,
        )
        ranks_a_sample = self.config.trainer.context_parallel
        if ranks_a_sample > 1:
            self._parts = ContextParallel(dist.new_subgroups(ranks_a_sample)[0])
        # Rank 0 looks; others may see its folder as it was.
        path, has_damaged = trainer.strategy.broadcast(
            (self.store.newest(), any(self.store.folder.glob("*.damaged")))
            if trainer.is_global_zero
            else (None, False)
        )
        if path is None and has_damaged:
            raise CheckpointError(
                f"{self.store.folder}: found damaged checkpoints alone, wanted a whole one; "
                "to start over, give the run another name or remove its folder"
            )
        if path is not None:
            self._restore(trainer, module, Saved(path, rank_group=group))
            self._step = module.progress.step
        module.model.split_sequence(self._parts)
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
        self.requests.keep_signals()
        if self.books is not None:
            peak = peak_flops(self.config.trainer.precision)
            if peak is None:
                logger.warning(
                    "model FLOP utilisation is not logged: the peak of %s is not known",
                    torch.cuda.get_device_name(),
                )
            else:
                # Training takes three times the forward's.
                flops = 3 * _pretraining(pl_module).model.flops_per_token(self.config.data.context)
                self._full_speed = trainer.world_size * peak / flops
        self._idle_since = self._update_began = time.perf_counter()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._data_wait += time.perf_counter() - self._idle_since
        self._note("computing")

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
        self._note("waiting for data")
        self._idle_since = time.perf_counter()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self.watchdog is not None
        self.watchdog.stop()

    def end_watch(self, error: Exception) -> str | None:
        """When this rank failed: Watchdog.give_up."""
        return self.watchdog.give_up(one_line(error)) if self.watchdog is not None else ""

    def _note(self, doing: str) -> None:
        assert self.watchdog is not None
        self.watchdog.note(self._step, doing)

    def _after_update(self, trainer: Trainer, module: Pretraining, update: Update) -> None:
        progress = module.progress
        self._step = progress.step
        is_last = progress.step >= self.config.num_updates
        ranks = self._meet()
        self._record(progress, update, ranks)
        if is_last or progress.step % self.validation_updates == 0:
            self._note("validating")
            self._validate(module)
        wants_stop, wants_save = any(r.wants_stop for r in ranks), any(r.wants_save for r in ranks)
        if any(r.has_failed_save for r in ranks):
            self._finish_save()
        if is_last or wants_stop or wants_save or progress.step % self.checkpoint_updates == 0:
            self._note("saving")
            self._save(trainer, module)
        if is_last or wants_stop:
            self._finish_save()
        if (wants_stop or wants_save) and self.books is not None:
            self.requests.clear_files()
        if wants_stop and not is_last:
            self.is_stopped = True
            trainer.should_stop = True
        # Validation and saving are not part of the next update's time.
        self._update_began = time.perf_counter()
        self._data_wait = 0.0

    def _meet(self) -> list[RankReport]:
        """What all ranks report of this update; how they agree on what comes next."""
        is_first = self.books is not None
        report = RankReport(
            seconds=time.perf_counter() - self._update_began,
            data_wait=self._data_wait,
            peak_bytes=_peak_memory(),
            # Rank 0 alone looks for files: the others may see them later.
            wants_stop=self.requests.wants_stop if is_first else self.requests.has_signal,
            wants_save=is_first and self.requests.wants_save,
            has_failed_save=self.store.has_failed,
        )
        if self._group is None:
            return [report]
        own = torch.tensor(report, dtype=torch.float64)
        found = [torch.empty_like(own) for _ in range(dist.get_world_size(self._group))]
        self._note("waiting for the other ranks")
        dist.all_gather(found, own, group=self._group)
        return [RankReport(*values.tolist()) for values in found]

    def _record(self, progress: Progress, update: Update, ranks: list[RankReport]) -> None:
        if self.books is None:
            return
        seconds = ranks[0].seconds
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
            "train/data_wait_seconds": max(rank.data_wait for rank in ranks),
            "train/peak_memory_bytes": max(rank.peak_bytes for rank in ranks),
            "train/replaced_shards": len(self.data.bad_shards),
        }
        if self._full_speed is not None:
            values["train/model_flops_utilisation"] = tokens_per_second / self._full_speed
        self.books.tracker.log("train", progress.step, values)

    def _validate(self, module: Pretraining) -> None:
        if self.data.validation_manifest is None:
            return
        # Ranks that share sequences in training have validation samples of their own.
        module.model.split_sequence(None)
        metric = measure_positions(
            module.model,
            self._validation_batches,
            self.config.data.context,
            module.device,
            self.config.trainer.precision,
        )
        module.model.split_sequence(self._parts)
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
