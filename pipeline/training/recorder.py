"""Records a run on rank 0: metrics, skipped updates, validation losses, checkpoints, stragglers.

Metrics go through the tracker to logs/metrics.jsonl (tracking/metrics_journal.py) and to MLflow.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from longhaul.configs import RunConfig
from longhaul.datamodules.data_module import TokenDataModule
from longhaul.kernels.backend import resolve_backend
from longhaul.modules.language_model import LanguageModel
from longhaul.modules.pretraining import Update
from longhaul.modules.progress import Progress, Skip, is_passed
from longhaul.pipeline.checkpoints.reader import SavedCheckpoint
from longhaul.pipeline.runs.data import record_data
from longhaul.pipeline.runs.folder import RunFolder, stored_config
from longhaul.pipeline.system.devices import peak_flops
from longhaul.pipeline.system.waiting import FAILURE_UPLOAD_S
from longhaul.pipeline.tracking.tracker import Tracker
from longhaul.pipeline.training.announcement import config_warnings, summary
from longhaul.pipeline.training.profiling import Communication
from longhaul.pipeline.training.progress import ProgressLine
from longhaul.pipeline.training.stragglers import StragglerReport

logger = logging.getLogger(__name__)


class RankReport(NamedTuple):
    """What a rank sends to all ranks after an update; all numbers, to fit in one tensor."""

    seconds: float  # duration of the update
    data_wait: float  # of these, seconds spent waiting for the data loader
    peak_bytes: float  # high-water mark of memory, on a GPU that of its tensors
    reserved_bytes: float  # on a GPU, high-water mark with what torch keeps for later; else 0
    wants_stop: float
    wants_save: float
    has_failed_save: float
    communication: float  # seconds in collectives; NaN where the update was not sampled
    exposed_communication: float  # of these, seconds without computation; NaN likewise
    saving: float  # seconds that checkpoints blocked training since the previous report
    updates_to_trace: float  # number that was requested


class Recorder:
    """Records the run's metrics on the terminal, in the run folder, and in MLflow."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        tracker: Tracker,
        data: TokenDataModule,
        parameters: int,
        source: Path | None,
    ) -> None:
        """Prepare; nothing is written before `begin`.

        Args:
            config, folder: of the run.
            tracker: not started yet.
            data: that is trained on.
            parameters: number of elements in all weights.
            source: from which the first weights were read, None for random ones.
        """
        self.tracker = tracker
        self.has_begun = False
        """Whether files of the run folder and the state in MLflow are this process's."""
        self._config = config
        self._folder = folder
        self._data = data
        self._parameters = parameters
        self._source = source
        self._ranks_file = folder.log_file.with_name("ranks.jsonl")
        self._progress_line = ProgressLine(config.name, config.num_updates)
        self._stragglers: StragglerReport | None = None
        # Of all devices together, by the length of sequences; empty where it is not known.
        self._peak_tokens_per_second: dict[int, float] = {}
        # Metrics that are measured at some updates only; the next recorded update includes them.
        self._pending: dict[str, float] = {}

    def begin(
        self,
        progress: Progress,
        saved: SavedCheckpoint | None,
        model: LanguageModel,
        hosts: Sequence[str],
        device: torch.device,
    ) -> None:
        """Record the start of training, which nothing can refuse any more.

        Args:
            progress: where training starts.
            saved: the checkpoint it resumes from, if any, of this run or of trainer.branch_from.
            model: for its FLOPs per token.
            hosts: host name of each rank.
            device: of this rank.
        """
        config, folder = self._config, self._folder
        before = stored_config(folder) if folder.config_file.exists() else None
        # What has saved nothing yet starts over, with the files that are here now.
        kinds, origin = config.model.kinds, saved and RunFolder(saved.path.parent.parent)
        changed = origin.changed_sources(kinds) if origin else []
        is_branch = origin is not None and origin.path != folder.path
        record_data(folder, config.data)
        folder.record_start(config)
        self.tracker.start()
        self.has_begun = True
        for line in summary(config, folder, self._data, self._parameters, device):
            self._progress_line.say(line)
        for line in (*changed, *config_warnings(config, self._data, before, progress.tokens)):
            logger.warning("%s", line)
        self._progress_line.begin(progress)
        if self._source is not None:
            logger.info("the run begins with the weights of %s", self._source)
        if saved is not None and is_branch:
            logger.info("the run goes on from %s", saved.path)
        elif saved is not None:  # missing in MLflow if the run was killed right after the save
            self.tracker.log_checkpoint(saved.path, progress.step)
        if len(hosts) > 1:
            self._stragglers = StragglerReport(self._ranks_file, hosts)
        if device.type != "cuda":
            return
        peak = peak_flops(config.trainer.precision)
        if peak is None:
            logger.warning(
                "model FLOP utilisation is not logged: the peak of %s is not known",
                torch.cuda.get_device_name(device),
            )
            return
        for context in (config.data.context, *(one.context for one in config.data.short_first)):
            flops = training_flops(model, context, device)
            self._peak_tokens_per_second[context] = len(hosts) * peak / flops

    def record(
        self,
        progress: Progress,
        update: Update,
        ranks: Sequence[RankReport],
        replaced_shards: int,
    ) -> None:
        """Record an update, skipped or not."""
        seconds = ranks[0].seconds
        tokens = update.steps * self._config.optim.tokens_per_update
        tokens_per_second = tokens / seconds
        self._progress_line.update(progress, update, tokens_per_second)
        self._record_ranks(progress.step, ranks)
        if update.skip is not None:
            self._record_skip(update.skip, update)
        every = self._config.tracking.every_updates
        is_due = is_passed(every, progress.step, update.steps)
        if not is_due and progress.step < self._config.num_updates:
            return
        values = {
            "curves/train_loss": update.loss,
            "train/gradient_norm": update.gradient_norm,
            "train/learning_rate": update.learning_rate,
            "train/tokens": progress.tokens,
            "train/skipped_updates": len(progress.skipped),
            "train/tokens_per_second": tokens_per_second,
            "train/step_seconds": seconds,
            "train/data_wait_seconds": max(rank.data_wait for rank in ranks),
            "train/peak_memory_bytes": max(rank.peak_bytes for rank in ranks),
            "train/replaced_shards": replaced_shards,
            **self._pending,
        }
        if update.z_loss is not None:
            values["train/z_loss"] = update.z_loss
        read = self._data.read_by(progress.samples)
        for (name, (count, epochs)), loss in zip(read.items(), update.source_losses, strict=True):
            values |= {f"train/tokens/{name}": count, f"train/epochs/{name}": epochs}
            if not math.isnan(loss):  # which it is where the update had no sample of it
                values[f"train/loss/{name}"] = loss
        self._pending = {}
        if reserved := max(rank.reserved_bytes for rank in ranks):
            values["train/reserved_memory_bytes"] = reserved
        data, context = self._config.data, self._config.data.context_at(progress.tokens - tokens)
        if data.short_first:
            values["train/context"] = context
        if self._peak_tokens_per_second:
            values["train/model_flops_utilisation"] = (
                tokens_per_second / self._peak_tokens_per_second[context]
            )
        self.tracker.log("train", progress.step, values)

    def record_validation(self, progress: Progress, values: Mapping[str, float]) -> None:
        """Record the result of a pass over the validation samples."""
        self.tracker.log("validation", progress.step, values)
        self._progress_line.validation(progress, values["curves/validation_loss"])

    def end(self) -> None:
        """Close the progress bar."""
        self._progress_line.end()

    def record_failure(self) -> None:
        """Record the status FAILED. Called right before the process ends."""
        if self.has_begun:
            self.tracker.finish("FAILED", timeout_s=FAILURE_UPLOAD_S)

    def _record_skip(self, skip: Skip, update: Update) -> None:
        cause = "a spike" if skip.is_spike else "not finite"
        if skip.rewound_to is not None:
            cause += f"; back to the weights of step {skip.rewound_to}"
        logger.warning(
            "step %d is skipped, samples %d to %d: loss %g, gradient norm %g, %s",
            *(skip.step, skip.first_sample, skip.last_sample),
            *(update.loss, update.gradient_norm, cause),
        )
        values = {
            "skipped/loss": update.loss,
            "skipped/gradient_norm": update.gradient_norm,
            "skipped/first_sample": skip.first_sample,
            "skipped/last_sample": skip.last_sample,
            "skipped/is_spike": skip.is_spike,
        }
        if skip.rewound_to is not None:
            values["skipped/rewound_to_step"] = skip.rewound_to
        self.tracker.log("skipped", skip.step, values)

    def _record_ranks(self, step: int, ranks: Sequence[RankReport]) -> None:
        """Collect what is not measured at every update: time for checkpoints, and stragglers."""
        saving = max(rank.saving for rank in ranks)
        if saving:
            before = self._pending.get("train/checkpoint_seconds", 0.0)
            self._pending["train/checkpoint_seconds"] = before + saving
        if self._stragglers is not None and not any(math.isnan(r.communication) for r in ranks):
            self._pending |= self._stragglers.add(
                step,
                seconds=[rank.seconds for rank in ranks],
                communication=[
                    Communication(rank.communication, rank.exposed_communication) for rank in ranks
                ],
                data_wait=[rank.data_wait for rank in ranks],
                peak_bytes=[rank.peak_bytes for rank in ranks],
            )


def training_flops(model: LanguageModel, context: int, device: torch.device) -> int:
    """FLOPs per token of a forward and a backward pass, in the form that a device computes."""
    # The backward pass takes twice the FLOPs of the forward pass.
    return 3 * model.flops_per_token(context, resolve_backend("auto", device))
