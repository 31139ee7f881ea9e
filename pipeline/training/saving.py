"""Saves checkpoints after updates, and goes back to the newest one at a start or after a spike."""

import dataclasses
import logging
import time
from functools import partial
from pathlib import Path

from lightning.pytorch import Trainer

from longhaul.configs import RunConfig
from longhaul.datamodules.data_module import TokenDataModule
from longhaul.modules.pretraining import Pretraining
from longhaul.modules.progress import Progress
from longhaul.pipeline.checkpoints.integrity import CheckpointError
from longhaul.pipeline.checkpoints.reader import SavedCheckpoint
from longhaul.pipeline.checkpoints.rng import capture_rng, restore_rng
from longhaul.pipeline.checkpoints.store import CheckpointStore
from longhaul.pipeline.checkpoints.training_state import TrainingState
from longhaul.pipeline.distributed.strategy import resumable
from longhaul.pipeline.runs.trunk import branch_point
from longhaul.pipeline.training.after_update import AfterUpdate
from longhaul.pipeline.training.recorder import Recorder

logger = logging.getLogger(__name__)


class Saving:
    """The checkpoints of a run, which all ranks write together in the background."""

    def __init__(
        self,
        config: RunConfig,
        data: TokenDataModule,
        store: CheckpointStore,
        recorder: Recorder | None,
    ) -> None:
        """`recorder` is for rank 0; the other ranks pass None."""
        self.store = store
        self._config = config
        self._data = data
        self._recorder = recorder
        self._unlogged_checkpoint: tuple[Path, int] | None = None
        self._seconds = 0.0

    def resume(self, trainer: Trainer, module: Pretraining) -> SavedCheckpoint | None:
        """Restore model, optimizer, counters and RNG from the newest checkpoint, if there is one.

        A run that has none yet begins with a checkpoint of the run in trainer.branch_from.

        Raises:
            ValueError: it was trained on other shards, or holds weights alone.
        """
        saved = self.store.open_newest()
        if saved is None and self._config.trainer.branch_from is not None:
            saved = self.store.open_found(partial(branch_point, self._config))
        if saved is None:
            return None
        self._restore(trainer, module, saved)
        return saved

    def _restore(self, trainer: Trainer, module: Pretraining, saved: SavedCheckpoint) -> None:
        """Restore all of a checkpoint."""
        if not any(name.startswith("rng/") for name in saved.tensors):
            raise ValueError(
                f"{saved.path}: found weights alone, wanted the optimizer's state too; a run of "
                "another name begins with them by trainer.start_from"
            )
        state = saved.state(TrainingState)
        # The run folder's own record was compared before; this is a checkpoint from elsewhere.
        corpus = self._data.corpus
        if state.shards_sha256 != corpus.fingerprint_at(state.progress.tokens):
            key, what = "data.manifest", "shards"
            if corpus.has_names:
                key, what = "data.sources", "shards or weights"
            raise ValueError(
                f"{key}: found other {what} in {corpus.location} than this run was trained on, "
                "wanted the same ones"
            )
        resumable(trainer).restore(module.model, trainer.optimizers[0], saved)
        restore_rng(saved.read_group("rng"))
        module.progress = Progress(**vars(state.progress))

    def rewind_if_due(self, after: AfterUpdate) -> None:
        """Restore weights and moments from the newest checkpoint, but go on with the next step.

        The step and the data stream are not rewound, so the samples of a step remain a function of
        the step. Which checkpoint is the newest may depend on where the run was stopped before.
        """
        skip = after.update.skip
        if skip is None or not skip.is_spike or self._config.optim.on_spike != "rewind":
            return
        after.set_activity("rewinding")
        self.finish()
        try:
            saved = self.store.open_newest()
        except CheckpointError as error:
            saved = None
            if self._recorder is not None:
                logger.warning("%s", error)
        if saved is None:
            if self._recorder is not None:
                logger.warning("step %d: found no checkpoint to rewind to", skip.step)
            return
        resumable(after.trainer).restore(after.module.model, after.trainer.optimizers[0], saved)
        # Otherwise the losses of the restored weights would be spikes compared with the lower
        # losses of the weights that are dropped.
        before = saved.state(TrainingState).progress
        after.progress.recent_losses = before.recent_losses
        skip.rewound_to = before.step

    def save_if_due(self, after: AfterUpdate) -> None:
        """Start a checkpoint. The last one of this process is waited for."""
        if any(rank.has_failed_save for rank in after.ranks):
            self.finish()
        is_end = after.is_last or after.wants_stop
        is_due = after.is_due(self._config.checkpoint.every_tokens) or after.evaluation_is_due
        if is_end or after.wants_save or is_due:
            after.set_activity("saving")
            self._start(after.trainer, after.module)
        if is_end:
            self.finish()

    def finish(self) -> None:
        """Wait for the checkpoint that is being written. Raises CheckpointError if it failed."""
        began = time.perf_counter()
        self.store.wait()
        if self._recorder is not None and self._unlogged_checkpoint is not None:
            self._recorder.tracker.log_checkpoint(*self._unlogged_checkpoint)
        self._unlogged_checkpoint = None
        self._seconds += time.perf_counter() - began

    def take_seconds(self) -> float:
        """How long checkpoints have blocked training since the previous call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _start(self, trainer: Trainer, module: Pretraining) -> None:
        self.finish()
        began = time.perf_counter()
        tensors = resumable(trainer).tensors(module.model, trainer.optimizers[0])
        if self._recorder is not None:
            # The journal is flushed first: a run that resumes from this checkpoint does not log its
            # steps again, so a crash must not lose them.
            self._recorder.tracker.sync()
            tensors |= {f"rng/{name}": tensor for name, tensor in capture_rng().items()}
        path = self.store.start(
            module.progress.step,
            tensors,
            {
                "progress": dataclasses.asdict(module.progress),
                "shards_sha256": self._data.corpus.fingerprint_at(module.progress.tokens),
                "mlflow_run_id": self._recorder.tracker.run_id if self._recorder else None,
            },
        )
        self._unlogged_checkpoint = path, module.progress.step
        self._seconds += time.perf_counter() - began
