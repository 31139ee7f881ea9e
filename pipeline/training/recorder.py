"""What rank 0 writes down of every update: metrics, skips, validations, checkpoints, slow ranks."""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from longhaul.configs import RunConfig
from longhaul.modules.language_model import LanguageModel
from longhaul.modules.pretraining import Progress, Skip, Update
from longhaul.pipeline.checkpoints.store import SavedCheckpoint
from longhaul.pipeline.runs.folder import RunFolder
from longhaul.pipeline.system.devices import peak_flops
from longhaul.pipeline.tracking.tracker import Tracker
from longhaul.pipeline.training.profiling import Communication
from longhaul.pipeline.training.progress import ProgressLine
from longhaul.pipeline.training.stragglers import StragglerReport

logger = logging.getLogger(__name__)

_SECONDS_FOR_LAST_WORDS = 10.0


class RankReport(NamedTuple):
    """What a rank tells the others after an update; numbers, so that a tensor can carry it."""

    seconds: float  # the update took
    data_wait: float  # of them, for the loader
    peak_bytes: float
    wants_stop: float
    wants_save: float
    has_failed_save: float
    communication: float  # of the seconds; NaN where the profiler did not look, as the next
    exposed_communication: float
    saving: float  # seconds that training has stood still for checkpoints since the last report
    wants_profile: float  # updates to be traced


class Books:
    """How the run goes: on the terminal, in MLflow, and in the run folder."""

    def __init__(self, config: RunConfig, folder: RunFolder, tracker: Tracker) -> None:
        """`tracker` has been started."""
        self.tracker = tracker
        self._config = config
        self._ranks_file = folder.log_file.with_name("ranks.jsonl")
        self._show = ProgressLine(config.name, config.num_updates)
        self._stragglers: StragglerReport | None = None
        self._full_speed: float | None = None  # tokens/s of all devices at their peak
        # Metrics that wait for the next update that is recorded.
        self._unrecorded: dict[str, float] = {}

    def begin(
        self,
        progress: Progress,
        saved: SavedCheckpoint | None,
        model: LanguageModel,
        hosts: Sequence[str],
    ) -> None:
        """Training begins, from a checkpoint if there is one, on ranks on these machines."""
        self._show.begin(progress)
        if saved is not None:  # killed right after the save, MLflow may not know it yet
            self.tracker.log_checkpoint(saved.path, progress.step)
        if len(hosts) > 1:
            self._stragglers = StragglerReport(self._ranks_file, hosts)
        peak = peak_flops(self._config.trainer.precision)
        if peak is None:
            logger.warning(
                "model FLOP utilisation is not logged: the peak of %s is not known",
                torch.cuda.get_device_name(),
            )
            return
        # Training takes three times the forward's.
        flops = 3 * model.flops_per_token(self._config.data.context)
        self._full_speed = len(hosts) * peak / flops

    def record(
        self,
        progress: Progress,
        update: Update,
        ranks: Sequence[RankReport],
        replaced_shards: int,
    ) -> None:
        """One more update is done."""
        seconds = ranks[0].seconds
        tokens_per_second = self._config.optim.tokens_per_update / seconds
        self._show.update(progress, update, tokens_per_second)
        self._watch_ranks(progress.step, ranks)
        if update.skip is not None:
            self._record_skip(update.skip, update)
        every = self._config.tracking.every_updates
        if progress.step % every and progress.step < self._config.num_updates:
            return
        values = {
            "train/loss": update.loss,
            "train/gradient_norm": update.gradient_norm,
            "train/learning_rate": update.learning_rate,
            "train/tokens": progress.tokens,
            "train/skipped_updates": len(progress.skipped),
            "train/tokens_per_second": tokens_per_second,
            "train/step_seconds": seconds,
            "train/data_wait_seconds": max(rank.data_wait for rank in ranks),
            "train/peak_memory_bytes": max(rank.peak_bytes for rank in ranks),
            "train/replaced_shards": replaced_shards,
            **self._unrecorded,
        }
        self._unrecorded = {}
        if self._full_speed is not None:
            values["train/model_flops_utilisation"] = tokens_per_second / self._full_speed
        self.tracker.log("train", progress.step, values)

    def record_validation(self, progress: Progress, values: Mapping[str, float]) -> None:
        """A pass over the validation samples is done."""
        self.tracker.log("validation", progress.step, values)
        self._show.validation(progress, values["validation/loss"])

    def end(self) -> None:
        """Leave the terminal as it was."""
        self._show.end()

    def give_up(self) -> None:
        """Say in MLflow that the run failed, when the process is about to be ended."""
        self.tracker.finish("FAILED", timeout_s=_SECONDS_FOR_LAST_WORDS)

    def _record_skip(self, skip: Skip, update: Update) -> None:
        text = "a spike" if skip.is_spike else "not finite"
        if skip.rewound_to is not None:
            text += f"; back to the weights of step {skip.rewound_to}"
        logger.warning(
            "step %d is skipped, samples %d to %d: loss %g, gradient norm %g, %s",
            *(skip.step, skip.first_sample, skip.last_sample),
            *(update.loss, update.gradient_norm, text),
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

    def _watch_ranks(self, step: int, ranks: Sequence[RankReport]) -> None:
        """Take down what is not measured in every update."""
        saving = max(rank.saving for rank in ranks)
        if saving:
            before = self._unrecorded.get("train/checkpoint_seconds", 0.0)
            self._unrecorded["train/checkpoint_seconds"] = before + saving
        if self._stragglers is not None and not any(math.isnan(r.communication) for r in ranks):
            self._unrecorded |= self._stragglers.add(
                step,
                seconds=[rank.seconds for rank in ranks],
                communication=[
                    Communication(rank.communication, rank.exposed_communication) for rank in ranks
                ],
                data_wait=[rank.data_wait for rank in ranks],
                peak_bytes=[rank.peak_bytes for rank in ranks],
            )
