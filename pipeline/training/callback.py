"""The Lightning callback that resumes a run, and does what is due after each update.

After an update it records metrics, validates, saves a checkpoint, evaluates it, or stops on
request.
Whether an update is skipped is decided in modules/skipped_updates.py and, for gradients that are
not finite, in modules/pretraining.py. What follows from a skip is decided here.
"""

import dataclasses
import logging
import resource
import socket
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from longhaul.configs import RunConfig
from longhaul.datamodules.data_module import TokenDataModule
from longhaul.modules.pretraining import Pretraining, Update
from longhaul.modules.progress import Progress
from longhaul.modules.skipped_updates import Skip
from longhaul.pipeline.checkpoints.integrity import CheckpointError
from longhaul.pipeline.checkpoints.reader import SavedCheckpoint
from longhaul.pipeline.checkpoints.rng import capture_rng, restore_rng
from longhaul.pipeline.checkpoints.store import CheckpointStore
from longhaul.pipeline.checkpoints.training_state import TrainingState
from longhaul.pipeline.distributed.context_parallel import ContextParallel
from longhaul.pipeline.distributed.launch import collective_timeout, limit_collectives
from longhaul.pipeline.distributed.strategies import resumable
from longhaul.pipeline.distributed.watchdog import Watchdog
from longhaul.pipeline.evaluation.registry import TASKS
from longhaul.pipeline.evaluation.run import evaluate
from longhaul.pipeline.evaluation.task import Options
from longhaul.pipeline.evaluation.tasks.positions import measure_positions, summarise
from longhaul.pipeline.runs.folder import RunFolder
from longhaul.pipeline.runs.ranks import ALONE, Ranks
from longhaul.pipeline.runs.trained_model import load_trained_model
from longhaul.pipeline.training.post_mortem import leave_stacks, record_memory
from longhaul.pipeline.training.preemption import StopRequests
from longhaul.pipeline.training.profiling import Communication, UpdateProfiler
from longhaul.pipeline.training.recorder import RankReport, Recorder

logger = logging.getLogger(__name__)


class TrainingCallback(Callback):
    """Restores the newest checkpoint at the start, and does what is due after every update.

    Pretraining.progress alone counts steps, samples and tokens. Lightning's own counters start at 0
    in every process, so they are not used.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        data: TokenDataModule,
        requests: StopRequests,
        recorder: Recorder | None,
    ) -> None:
        """`recorder` is for rank 0; the other ranks pass None."""
        self.config = config
        self.data = data
        self.requests = requests
        self.recorder = recorder
        self.is_stopped = False
        self.watchdog: Watchdog | None = None
        self._validation_batches = data.val_dataloader()
        tokens_per_update = config.optim.tokens_per_update
        # How many updates lie between two checkpoints, validations, or evaluations.
        self.checkpoint_updates = max(1, config.checkpoint.every_tokens // tokens_per_update)
        self.validation_updates = max(1, config.trainer.validate_every_tokens // tokens_per_update)
        self.evaluation_updates = max(1, config.evaluation.every_tokens // tokens_per_update)
        self._folder = folder
        self.store: CheckpointStore
        self._update_began = 0.0
        self._idle_since = 0.0
        self._data_wait = 0.0
        self._unlogged_checkpoint: tuple[Path, int] | None = None
        self._step = 0
        self._device: torch.device
        self._profiler = UpdateProfiler(folder.path / "profile")
        self._seconds_saving = 0.0
        self._context_parallel: ContextParallel | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore model, optimizer, counters and RNG, before the data loader is built."""
        module = _pretraining(pl_module)
        config = self.config.checkpoint
        self._device = trainer.strategy.root_device
        self.requests.mark_ranks_connected()
        # Process groups cannot be made before the ranks are connected. Saves have a group of their
        # own, because they communicate at the same time as training.
        timeout = collective_timeout(self.config.trainer)
        save_group, self._group = (
            dist.new_group(backend="gloo", timeout=timeout) if dist.is_initialized() else None
            for _ in range(2)
        )
        self.watchdog = Watchdog(
            trainer.global_rank,
            trainer.world_size,
            trainer.num_nodes,
            self.config.trainer.hang_seconds,
            on_abort=lambda: self._end_at_once(trainer.global_rank),
        )
        self.requests.on_interrupt = self.watchdog.report_interrupt
        self.store = CheckpointStore(
            self._folder.checkpoints,
            keep_last=config.keep_last,
            keep_every=config.keep_every and config.keep_every * self.checkpoint_updates,
            group=save_group,
        )
        ranks_per_sample = self.config.trainer.context_parallel
        if ranks_per_sample > 1:
            self._context_parallel = ContextParallel(dist.new_subgroups(ranks_per_sample)[0])
        if dist.is_initialized():
            limit_collectives(timeout)
        saved = self.store.open_newest()
        if saved is not None:
            self._restore(trainer, module, saved)
            self._step = module.progress.step
        module.model.split_sequence(self._context_parallel)
        total = self.config.num_updates * self.config.samples_per_update
        self.data.start_at(module.progress.samples, max(0, total - module.progress.samples))
        hosts = [socket.gethostname()] * trainer.world_size
        if self._group is not None:
            dist.all_gather_object(hosts, hosts[0], group=self._group)
        if self.recorder:
            self.recorder.begin(module.progress, saved, module.model, hosts, self._device)

    def _end_at_once(self, rank: int) -> None:
        """Leave what helps to find out why, right before the watchdog ends this process."""
        logs = self._folder.log_file.parent
        leave_stacks(logs, rank)
        if self.recorder:
            logger.error("what all ranks were doing is in %s/stacks-rank-*.txt", logs)
            self.recorder.record_failure()

    def _restore(self, trainer: Trainer, module: Pretraining, saved: SavedCheckpoint) -> None:
        state = saved.state(TrainingState)
        self._check_same_data(state.shards_sha256)
        resumable(trainer).restore(module.model, trainer.optimizers[0], saved)
        restore_rng(saved.read_group("rng"))
        module.progress = Progress(**vars(state.progress))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        record_memory()
        self.requests.install_handlers()
        # Before every batch Lightning would all-reduce whether a SIGTERM came. A fast rank, and its
        # device, would wait there, and the time would count as waiting for data.
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
        self._idle_since = self._update_began = time.perf_counter()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._data_wait += time.perf_counter() - self._idle_since
        self._set_activity("computing")

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
        self._set_activity("waiting for data")
        self._idle_since = time.perf_counter()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self.watchdog is not None
        # An unfinished trace is dropped at a stop, which has a deadline: writing it may take long.
        self._profiler.close(is_wanted=not self.is_stopped)
        self.watchdog.stop()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._profiler.close()

    def report_failure(self, error: Exception) -> str | None:
        """Tell the other ranks that this one failed, and learn of their failures.

        Returns what Watchdog.report_failure does.
        """
        message = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return self.watchdog.report_failure(message) if self.watchdog is not None else ""

    def _set_activity(self, activity: str) -> None:
        """Tell the watchdog what this rank does from now on."""
        assert self.watchdog is not None
        self.watchdog.set_activity(self._step, activity)

    def _after_update(self, trainer: Trainer, module: Pretraining, update: Update) -> None:
        progress = module.progress
        self._step = progress.step
        is_last = progress.step >= self.config.num_updates
        seconds = time.perf_counter() - self._update_began
        ranks = self._exchange_reports(seconds, self._profiler.end())
        skip = update.skip
        if skip is not None and skip.is_spike and self.config.optim.on_spike == "rewind":
            self._set_activity("rewinding")
            self._rewind(trainer, module, skip)
        if self.recorder is not None:
            self.recorder.record(progress, update, ranks, len(self.data.bad_shards))
        module.check_skips(update)
        if is_last or progress.step % self.validation_updates == 0:
            self._set_activity("validating")
            self._validate(module)
        wants_stop, wants_save = any(r.wants_stop for r in ranks), any(r.wants_save for r in ranks)
        if any(r.has_failed_save for r in ranks):
            self._finish_save()
        is_due = progress.step % self.checkpoint_updates == 0 or self._evaluation_is_due(progress)
        if is_last or wants_stop or wants_save or is_due:
            self._set_activity("saving")
            self._save(trainer, module)
        if is_last or wants_stop:
            self._finish_save()
        if not wants_stop:  # a stop has a deadline, and an evaluation may take long
            self._evaluate(progress)
        if (wants_stop or wants_save) and self.recorder is not None:
            self.requests.clear_stop_and_save()
        if wants_stop and not is_last:
            self.is_stopped = True
            trainer.should_stop = True
        if not (is_last or wants_stop):
            updates_to_trace = int(ranks[0].updates_to_trace)
            self._profiler.begin(progress.step + 1, updates_to_trace)
            if updates_to_trace and self.recorder is not None:
                self.requests.clear_profile()
        # Validation and saving do not count as time of the next update.
        self._update_began = time.perf_counter()
        self._data_wait = 0.0

    def _exchange_reports(self, seconds: float, communication: Communication) -> list[RankReport]:
        """All-gather the reports of this update, so that all ranks decide alike what to do next."""
        is_first = self.recorder is not None
        report = RankReport(
            seconds=seconds,
            data_wait=self._data_wait,
            peak_bytes=_peak_memory(self._device),
            reserved_bytes=_reserved_memory(self._device),
            # Only rank 0 looks for request files: other nodes may see them later.
            wants_stop=self.requests.wants_stop if is_first else self.requests.has_signal,
            wants_save=is_first and self.requests.wants_save,
            has_failed_save=self.store.has_failed,
            communication=communication.total,
            exposed_communication=communication.exposed,
            saving=self._seconds_saving,
            updates_to_trace=(
                self.requests.updates_to_trace if is_first and not self._profiler.is_tracing else 0
            ),
        )
        self._seconds_saving = 0.0
        if self._group is None:
            return [report]
        own = torch.tensor(report, dtype=torch.float64)
        reports = [torch.empty_like(own) for _ in range(dist.get_world_size(self._group))]
        self._set_activity("waiting for the other ranks")
        dist.all_gather(reports, own, group=self._group)
        return [RankReport(*values.tolist()) for values in reports]

    def _rewind(self, trainer: Trainer, module: Pretraining, skip: Skip) -> None:
        """Restore weights and moments from the newest checkpoint, but go on with the next step.

        The step and the data stream are not rewound, so the samples of a step remain a function of
        the step. Which checkpoint is the newest may depend on where the run was stopped before.
        """
        self._finish_save()
        try:
            saved = self.store.open_newest()
        except CheckpointError as error:
            saved = None
            if self.recorder is not None:
                logger.warning("%s", error)
        if saved is None:
            if self.recorder is not None:
                logger.warning("step %d: found no checkpoint to rewind to", skip.step)
            return
        resumable(trainer).restore(module.model, trainer.optimizers[0], saved)
        # Otherwise the losses of the restored weights would be spikes compared with the lower
        # losses of the weights that are dropped.
        before = saved.state(TrainingState).progress
        module.progress.recent_losses = before.recent_losses
        skip.rewound_to = before.step

    def _validate(self, module: Pretraining) -> None:
        if not self._validation_batches:
            return
        # Without context parallelism: each rank has validation samples of its own.
        module.model.split_sequence(None)
        metric = measure_positions(
            module.model,
            self._validation_batches,
            self.config.data.context,
            module.device,
            self.config.trainer.precision,
        )
        module.model.split_sequence(self._context_parallel)
        values = summarise(metric.by_position()[0], "validation")
        # As the training loss: MLflow's pages order charts by name, and losses are looked at first.
        values["curves/validation_loss"] = values.pop("validation/loss")
        if self.recorder is not None:
            self.recorder.record_validation(module.progress, values)

    def _evaluation_is_due(self, progress: Progress) -> bool:
        is_last = progress.step >= self.config.num_updates
        is_due = is_last or progress.step % self.evaluation_updates == 0
        return is_due and progress.step > 0 and bool(self.config.evaluation.tasks)

    def _evaluate(self, progress: Progress) -> None:
        """Evaluate this step's checkpoint on all ranks together, if it is due."""
        if not self._evaluation_is_due(progress):
            return
        self._finish_save()
        ranks = ALONE
        if self._group is not None:
            ranks = Ranks(dist.get_rank(), dist.get_world_size(), self._group)
        devices = [self._device] if self._device.type == "cuda" else []
        checkpoint = self.store.path_of(progress.step)
        for name in TASKS:
            # A stop waits for one task at most; more could take longer than its deadline.
            (wants_stop,) = ranks.gather([self.requests.wants_stop] if ranks.is_first else [])
            if name not in self.config.evaluation.tasks or wants_stop:
                continue
            self._set_activity(f"evaluating {name}")
            # Evaluation must not change the random numbers of training.
            with torch.random.fork_rng(devices):
                self._run_task(name, checkpoint, ranks)
        if devices:
            torch.cuda.reset_peak_memory_stats(self._device)

    def _run_task(self, name: str, checkpoint: Path, ranks: Ranks) -> None:
        """Run an evaluation task. One that fails on a rank is logged, and training goes on."""
        try:
            with ranks.together():
                trained = load_trained_model(checkpoint, ranks=ranks, device=self._device)
                tracker = None if self.recorder is None else self.recorder.tracker
                evaluate(trained, [name], Options(), tracker)
        except (ValueError, OSError, RuntimeError) as error:
            if ranks.is_first:
                logger.warning(
                    "%s: the evaluation task %s failed: %s", checkpoint.name, name, error
                )

    def _save(self, trainer: Trainer, module: Pretraining) -> None:
        """Start a checkpoint, which the ranks write in the background."""
        self._finish_save()
        began = time.perf_counter()
        tensors = resumable(trainer).tensors(module.model, trainer.optimizers[0])
        if self.recorder is not None:
            # The journal is flushed first: a run that resumes from this checkpoint does not log its
            # steps again, so a crash must not lose them.
            self.recorder.tracker.sync()
            tensors |= {f"rng/{name}": tensor for name, tensor in capture_rng().items()}
        path = self.store.start(
            module.progress.step,
            tensors,
            {
                "progress": dataclasses.asdict(module.progress),
                "shards_sha256": self.data.corpus.fingerprint,
                "mlflow_run_id": self.recorder.tracker.run_id if self.recorder else None,
            },
        )
        self._unlogged_checkpoint = path, module.progress.step
        self._seconds_saving += time.perf_counter() - began

    def _finish_save(self) -> None:
        """Wait for the checkpoint that is being written. Raises CheckpointError if it failed."""
        began = time.perf_counter()
        self.store.wait()
        if self.recorder is not None and self._unlogged_checkpoint is not None:
            self.recorder.tracker.log_checkpoint(*self._unlogged_checkpoint)
        self._unlogged_checkpoint = None
        self._seconds_saving += time.perf_counter() - began

    def _check_same_data(self, shards_sha256: str) -> None:
        # The run folder's own record was compared before; this is a checkpoint from elsewhere.
        if shards_sha256 != self.data.corpus.fingerprint:
            raise ValueError(
                f"data.manifest: found other shards in {self.config.data.manifest} than this run "
                "was trained on, wanted the same ones"
            )


def _pretraining(module: LightningModule) -> Pretraining:
    assert isinstance(module, Pretraining)
    return module


def _peak_memory(device: torch.device) -> float:
    """High-water mark of memory in bytes: of tensors on its GPU, without one of the process."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def _reserved_memory(device: torch.device) -> float:
    """High-water mark of what torch took of this process's GPU, used or not; 0 without a GPU."""
    return float(torch.cuda.max_memory_reserved(device)) if device.type == "cuda" else 0.0
