"""Measures the model after updates: on the validation samples, and by the evaluation tasks."""

import logging
from pathlib import Path

import torch

from longhaul.datamodules.data_module import TokenDataModule
from longhaul.pipeline.distributed.strategy import resumable
from longhaul.pipeline.evaluation.registry import TASKS
from longhaul.pipeline.evaluation.run import evaluate
from longhaul.pipeline.evaluation.tasks.positions import SourceLoss, measure_positions, summarise
from longhaul.pipeline.runs.ranks import Ranks
from longhaul.pipeline.runs.trained_model import copy_trained_model
from longhaul.pipeline.training.after_update import AfterUpdate
from longhaul.pipeline.training.preemption import StopRequests
from longhaul.pipeline.training.recorder import Recorder
from longhaul.pipeline.training.saving import Saving

logger = logging.getLogger(__name__)


class Validation:
    """The loss on the validation samples."""

    def __init__(self, data: TokenDataModule, recorder: Recorder | None) -> None:
        self._batches = data.val_dataloader()
        corpus = data.validation_corpus
        self._names = corpus.names if corpus is not None and corpus.has_names else ()
        self._recorder = recorder

    def validate_if_due(self, after: AfterUpdate) -> None:
        config, model = after.config, after.module.model
        if not after.is_due(config.trainer.validate_every_tokens):
            return
        after.set_activity("validating")
        if not self._batches:
            return
        # Without context parallelism: each rank has validation samples of its own.
        part = model.sequence_part
        model.split_sequence(None)
        by_source = None
        if self._names:
            by_source = SourceLoss(len(self._names)).to(after.module.device)
        metric = measure_positions(
            model,
            self._batches,
            config.data.context,
            after.module.device,
            config.trainer.precision,
            by_source=by_source,
        )
        model.split_sequence(part)
        values = summarise(metric.by_position()[0], "validation")
        # As the training loss: MLflow's pages order charts by name, and losses are looked at first.
        values["curves/validation_loss"] = values.pop("validation/loss")
        if by_source is not None:
            # torchmetrics makes a number of a vector of one.
            losses = zip(self._names, by_source.compute().flatten().tolist(), strict=True)
            values |= {f"validation/loss/{name}": loss for name, loss in losses}
        if self._recorder is not None:
            self._recorder.record_validation(after.progress, values)


class Evaluation:
    """The tasks of `evaluation.tasks`, on the checkpoint of the update."""

    def __init__(
        self,
        saving: Saving,
        requests: StopRequests,
        recorder: Recorder | None,
        ranks: Ranks,
        device: torch.device,
    ) -> None:
        self._saving = saving
        self._requests = requests
        self._recorder = recorder
        self._ranks = ranks
        self._device = device

    def evaluate_if_due(self, after: AfterUpdate) -> None:
        """Evaluate on all ranks together, unless the run stops: a stop has a deadline."""
        if after.wants_stop or not after.evaluation_is_due:
            return
        self._saving.finish()
        devices = [self._device] if self._device.type == "cuda" else []
        checkpoint = self._saving.store.path_of(after.progress.step)
        for name in TASKS:
            # A stop waits for one task at most; more could take longer than its deadline.
            own = [self._requests.wants_stop] if self._ranks.is_first else []
            (wants_stop,) = self._ranks.gather(own)
            if name not in after.config.evaluation.tasks or wants_stop:
                continue
            after.set_activity(f"evaluating {name}")
            # Evaluation must not change the random numbers of training.
            with torch.random.fork_rng(devices):
                self._run_task(name, checkpoint, after)
        if devices:
            torch.cuda.reset_peak_memory_stats(self._device)

    def _run_task(self, name: str, checkpoint: Path, after: AfterUpdate) -> None:
        """Run an evaluation task. One that fails on a rank is logged, and training goes on."""
        try:
            with self._ranks.together():
                weights = resumable(after.trainer).whole_weights(after.module.model)
                trained = copy_trained_model(checkpoint, weights, self._ranks, self._device)
                tracker = None if self._recorder is None else self._recorder.tracker
                evaluate(trained, [name], {}, tracker)
        except Exception as error:  # A task may be anybody's file.
            if self._ranks.is_first:
                logger.warning(
                    "%s: the evaluation task %s failed: %s", checkpoint.name, name, error
                )
