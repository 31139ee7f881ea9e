"""The Lightning callback that resumes a run, and calls the hooks for what is due after each update.

A hook validates, saves or does something else, if it is due. Whether an update is skipped is
decided in modules/pretraining.py.
"""

import logging
import resource
import socket
import time
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from longhaul.configs import RunConfig
from longhaul.datamodules.data_module import TokenDataModule
from longhaul.modules.pretraining import Pretraining, Update
from longhaul.pipeline.checkpoints.store import CheckpointStore
from longhaul.pipeline.distributed.context_parallel import ContextParallel
from longhaul.pipeline.distributed.launch import collective_timeout, limit_collectives
from longhaul.pipeline.distributed.watchdog import Watchdog
from longhaul.pipeline.runs.folder import RunFolder
from longhaul.pipeline.runs.ranks import SINGLE_PROCESS, Ranks
from longhaul.pipeline.training.after_update import AfterUpdate, Hook, updates_of
from longhaul.pipeline.training.evaluating import Evaluation, Validation
from longhaul.pipeline.training.post_mortem import leave_stacks, record_memory
from longhaul.pipeline.training.preemption import StopRequests
from longhaul.pipeline.training.profiling import Communication, UpdateProfiler
from longhaul.pipeline.training.recorder import RankReport, Recorder
from longhaul.pipeline.training.saving import Saving

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
        self._validation = Validation(data, recorder)
        self._folder = folder
        self.saving: Saving
        self._hooks: tuple[Hook, ...] = ()
        self._update_began = 0.0
        self._idle_since = 0.0
        self._data_wait = 0.0
        self._step = 0
        self._device: torch.device
        self._profiler = UpdateProfiler(folder.path / "profile")

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
            self.config.trainer.hang_seconds,
            on_abort=lambda: self._end_at_once(trainer.global_rank),
        )
        self.requests.on_interrupt = self.watchdog.report_interrupt
        larger = self.config.optim.larger_updates
        updates_between_saves = updates_of(self.config, config.every_tokens)
        store = CheckpointStore(
            self._folder.checkpoints,
            keep_last=config.keep_last,
            keep_every=config.keep_every and config.keep_every * updates_between_saves,
            longest_update=max(one.factor for one in larger) if larger else 1,
            group=save_group,
        )
        self.saving = Saving(self.config, self.data, store, self.recorder)
        part = None
        if (ranks_per_sample := self.config.trainer.context_parallel) > 1:
            part = ContextParallel(dist.new_subgroups(ranks_per_sample)[0])
        ranks = SINGLE_PROCESS
        if self._group is not None:
            limit_collectives(timeout)
            ranks = Ranks(dist.get_rank(), dist.get_world_size(), self._group)
        saved = self.saving.resume(trainer, module)
        self._step = module.progress.step
        module.model.split_sequence(part)
        evaluation = Evaluation(self.saving, self.requests, self.recorder, ranks, self._device)
        # In this order, after every update.
        self._hooks = (
            self.saving.rewind_if_due,
            self._record,
            self._validation.validate_if_due,
            self.saving.save_if_due,
            evaluation.evaluate_if_due,
            self._stop_if_due,
            self._profile_if_due,
        )
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
        self._step = module.progress.step
        seconds = time.perf_counter() - self._update_began
        after = AfterUpdate(
            config=self.config,
            trainer=trainer,
            module=module,
            update=update,
            ranks=self._exchange_reports(seconds, self._profiler.end()),
            set_activity=self._set_activity,
        )
        for hook in self._hooks:
            hook(after)
        # Validation and saving do not count as time of the next update.
        self._update_began = time.perf_counter()
        self._data_wait = 0.0

    def _record(self, after: AfterUpdate) -> None:
        if self.recorder is not None:
            bad_shards = len(self.data.bad_shards)
            self.recorder.record(after.progress, after.update, after.ranks, bad_shards)
        after.module.check_skips(after.update)

    def _stop_if_due(self, after: AfterUpdate) -> None:
        if (after.wants_stop or after.wants_save) and self.recorder is not None:
            self.requests.clear_stop_and_save()
        if after.wants_stop and not after.is_last:
            self.is_stopped = True
            after.trainer.should_stop = True

    def _profile_if_due(self, after: AfterUpdate) -> None:
        if after.is_last or after.wants_stop:
            return
        updates_to_trace = int(after.ranks[0].updates_to_trace)
        self._profiler.begin(after.progress.step + 1, updates_to_trace)
        if updates_to_trace and self.recorder is not None:
            self.requests.clear_profile()

    def _exchange_reports(self, seconds: float, communication: Communication) -> list[RankReport]:
        """Give all ranks the reports of this update, so that they decide alike what to do next."""
        is_first = self.recorder is not None
        report = RankReport(
            seconds=seconds,
            data_wait=self._data_wait,
            peak_bytes=_peak_memory(self._device),
            reserved_bytes=_reserved_memory(self._device),
            # Only rank 0 looks for request files: other nodes may see them later.
            wants_stop=self.requests.wants_stop if is_first else self.requests.has_signal,
            wants_save=is_first and self.requests.wants_save,
            has_failed_save=self.saving.store.has_failed,
            communication=communication.total,
            exposed_communication=communication.exposed,
            saving=self.saving.take_seconds(),
            updates_to_trace=(
                self.requests.updates_to_trace if is_first and not self._profiler.is_tracing else 0
            ),
        )
        if self._group is None:
            return [report]
        own = torch.tensor(report, dtype=torch.float64)
        reports = own.new_empty(dist.get_world_size(self._group), len(own))
        self._set_activity("waiting for the other ranks")
        # gloo's all_gather is a ring: N - 1 rounds for N ranks. A broadcast takes log2 N.
        dist.gather(own, list(reports) if is_first else None, group=self._group, group_dst=0)
        dist.broadcast(reports, group=self._group, group_src=0)
        return [RankReport(*values) for values in reports.tolist()]


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
