"""What happens after each update: record, validate, save, show; and how a run is picked up."""

import dataclasses
import hashlib
import logging
import resource
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from longhaul.configs import RunConfig
from longhaul.datamodules.tokens import TokenDataModule
from longhaul.modules.pretraining import Pretraining, Progress, Skip, Update
from longhaul.pipeline.checkpoints.rng import capture_rng, restore_rng
from longhaul.pipeline.checkpoints.store import CheckpointError, CheckpointStore, SavedCheckpoint
from longhaul.pipeline.evaluation.registry import TASKS
from longhaul.pipeline.evaluation.run import evaluate
from longhaul.pipeline.evaluation.task import Options
from longhaul.pipeline.evaluation.tasks.positions import measure_positions, summarise
from longhaul.pipeline.runs.folder import RunFolder
from longhaul.pipeline.runs.trained_model import load_trained_model
from longhaul.pipeline.training.context_parallel import ContextParallel
from longhaul.pipeline.training.preemption import StopRequests
from longhaul.pipeline.training.profiling import Communication, UpdateProfiler
from longhaul.pipeline.training.recorder import Books, RankReport
from longhaul.pipeline.training.strategies import resumable
from longhaul.pipeline.training.watchdog import Watchdog

logger = logging.getLogger(__name__)


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
        self.evaluation_updates = max(
            1, config.evaluation.every_tokens // config.optim.tokens_per_update
        )
        self._folder = folder
        self.store: CheckpointStore
        self._update_began = 0.0
        self._idle_since = 0.0
        self._data_wait = 0.0
        self._unlogged: tuple[Path, int] | None = None
        self._step = 0
        self._profiler = UpdateProfiler(folder.path / "profile")
        self._saving = 0.0
        self._parts: ContextParallel | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore model, optimiser, counters and RNG before the loader is built."""
        module = _pretraining(pl_module)
        config = self.config.checkpoint
        self.requests.ranks_have_met()
        # Only now are there groups of ranks. Saves talk while training does: they have their own.
        # The watchdog ends what takes too long, before they would.
        patience = timedelta(seconds=self.config.trainer.hang_seconds + 300)
        group, self._group = (
            dist.new_group(backend="gloo", timeout=patience) if dist.is_initialized() else None
            for _ in range(2)
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
        saved = self.store.open_newest()
        if saved is not None:
            self._restore(trainer, module, saved)
            self._step = module.progress.step
        module.model.split_sequence(self._parts)
        total = self.config.num_updates * self.config.samples_per_update
        self.data.start_at(module.progress.samples, max(0, total - module.progress.samples))
        hosts = [socket.gethostname()] * trainer.world_size
        if self._group is not None:
            dist.all_gather_object(hosts, hosts[0], group=self._group)
        if self.books:
            self.books.begin(module.progress, saved, module.model, hosts)

    def _restore(self, trainer: Trainer, module: Pretraining, saved: SavedCheckpoint) -> None:
        resumable(trainer).restore(module.model, trainer.optimizers[0], saved)
        restore_rng(saved.read_group("rng"))
        module.progress = Progress.from_dict(saved.state["progress"])
        self._check_same_data(saved.state["shards_sha256"])

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.requests.keep_signals()
        # Lightning would ask all ranks before every batch whether a SIGTERM came: a fast rank, and
        # its device, would wait there, and it would look like waiting for data.
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
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
        # A stop has a deadline, and a long trace takes long to write.
        self._profiler.close(is_wanted=not self.is_stopped)
        self.watchdog.stop()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._profiler.close()

    def end_watch(self, error: Exception) -> str | None:
        """When this rank failed: Watchdog.give_up."""
        words = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return self.watchdog.give_up(words) if self.watchdog is not None else ""

    def _note(self, doing: str) -> None:
        assert self.watchdog is not None
        self.watchdog.note(self._step, doing)

    def _after_update(self, trainer: Trainer, module: Pretraining, update: Update) -> None:
        progress = module.progress
        self._step = progress.step
        is_last = progress.step >= self.config.num_updates
        seconds = time.perf_counter() - self._update_began
        ranks = self._meet(seconds, self._profiler.end())
        skip = update.skip
        if skip is not None and skip.is_spike and self.config.optim.on_spike == "rewind":
            self._note("rewinding")
            self._rewind(trainer, module, skip)
        if self.books is not None:
            self.books.record(progress, update, ranks, len(self.data.bad_shards))
        if progress.skipped_in_a_row >= self.config.optim.max_skipped_updates:
            raise RuntimeError(
                f"loss {update.loss} and gradient norm {update.gradient_norm}: found "
                f"{progress.skipped_in_a_row} updates in a row that had to be skipped, the last at "
                f"step {progress.step}, wanted finite ones without a spike; the run cannot go on"
            )
        if is_last or progress.step % self.validation_updates == 0:
            self._note("validating")
            self._validate(module)
        wants_stop, wants_save = any(r.wants_stop for r in ranks), any(r.wants_save for r in ranks)
        if any(r.has_failed_save for r in ranks):
            self._finish_save()
        is_due = progress.step % self.checkpoint_updates == 0 or self._is_to_be_evaluated(progress)
        if is_last or wants_stop or wants_save or is_due:
            self._note("saving")
            self._save(trainer, module)
        if is_last or wants_stop:
            self._finish_save()
        if not wants_stop:  # which has a deadline
            self._evaluate(progress)
        if (wants_stop or wants_save) and self.books is not None:
            self.requests.clear_files()
        if wants_stop and not is_last:
            self.is_stopped = True
            trainer.should_stop = True
        if not (is_last or wants_stop):
            wants_profile = int(ranks[0].wants_profile)
            self._profiler.begin(progress.step + 1, wants_profile)
            if wants_profile and self.books is not None:
                self.requests.clear_profile()
        # Validation and saving are not part of the next update's time.
        self._update_began = time.perf_counter()
        self._data_wait = 0.0

    def _meet(self, seconds: float, communication: Communication) -> list[RankReport]:
        """What all ranks report of this update; how they agree on what comes next."""
        is_first = self.books is not None
        report = RankReport(
            seconds=seconds,
            data_wait=self._data_wait,
            peak_bytes=_peak_memory(),
            # Rank 0 alone looks for files: the others may see them later.
            wants_stop=self.requests.wants_stop if is_first else self.requests.has_signal,
            wants_save=is_first and self.requests.wants_save,
            has_failed_save=self.store.has_failed,
            communication=communication.total,
            exposed_communication=communication.exposed,
            saving=self._saving,
            wants_profile=(
                self.requests.wanted_profile if is_first and not self._profiler.is_tracing else 0
            ),
        )
        self._saving = 0.0
        if self._group is None:
            return [report]
        own = torch.tensor(report, dtype=torch.float64)
        found = [torch.empty_like(own) for _ in range(dist.get_world_size(self._group))]
        self._note("waiting for the other ranks")
        dist.all_gather(found, own, group=self._group)
        return [RankReport(*values.tolist()) for values in found]

    def _rewind(self, trainer: Trainer, module: Pretraining, skip: Skip) -> None:
        """Take the newest checkpoint's weights and moments; the step and the data go on.

        So what a step's samples are stays a function of the step. Which checkpoint is the newest
        may depend on where the run was stopped before.
        """
        self._finish_save()
        try:
            saved = self.store.open_newest()
        except CheckpointError as error:
            saved = None
            if self.books is not None:
                logger.warning("%s", error)
        if saved is None:
            if self.books is not None:
                logger.warning("step %d: found no checkpoint to go back to", skip.step)
            return
        resumable(trainer).restore(module.model, trainer.optimizers[0], saved)
        # Or the losses of the old weights would be spikes beside those of the later ones.
        before = saved.state["progress"]
        module.progress.recent_losses = before["recent_losses"]
        skip.rewound_to = before["step"]

    def _validate(self, module: Pretraining) -> None:
        if not self._validation_batches:
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
        values = summarise(metric.by_position()[0], "validation")
        if self.books is not None:
            self.books.record_validation(module.progress, values)

    def _is_to_be_evaluated(self, progress: Progress) -> bool:
        is_last = progress.step >= self.config.num_updates
        is_due = is_last or progress.step % self.evaluation_updates == 0
        return is_due and progress.step > 0 and bool(self.config.evaluation.tasks)

    def _evaluate(self, progress: Progress) -> None:
        """Measure this step's checkpoint, if it is due; the other ranks wait for the first.

        One that fails alone in a task that they share would leave the others within it.
        """
        if not self._is_to_be_evaluated(progress):
            return
        self._finish_save()
        self._note("evaluating")
        if self.books is not None:
            self._measure(self.store.path_of(progress.step), self.books)
        if self._group is not None:
            dist.barrier(self._group)

    def _measure(self, checkpoint: Path, books: Books) -> None:
        """Do the config's tasks; what fails is told, and training goes on."""
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        for name in TASKS:
            # Two tasks may take longer than a stop may.
            if name not in self.config.evaluation.tasks or self.requests.wants_stop:
                continue
            self._note(f"evaluating {name}")
            try:
                # Training goes on as if nothing had been measured.
                with torch.random.fork_rng(devices):
                    trained = load_trained_model(checkpoint)
                    evaluate(trained, [name], Options(), books.tracker)
            except (ValueError, OSError, RuntimeError) as error:
                logger.warning("%s: %s is not measured: %s", checkpoint.name, name, error)
        if devices:
            torch.cuda.reset_peak_memory_stats()

    def _save(self, trainer: Trainer, module: Pretraining) -> None:
        """Begin a checkpoint, which the ranks write while they go on."""
        self._finish_save()
        began = time.perf_counter()
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
        self._saving += time.perf_counter() - began

    def _finish_save(self) -> None:
        """Wait for the checkpoint that is being written; CheckpointError if it failed."""
        began = time.perf_counter()
        self.store.wait()
        if self.books is not None and self._unlogged is not None:
            self.books.tracker.log_checkpoint(*self._unlogged)
        self._unlogged = None
        self._saving += time.perf_counter() - began

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
