"""Starts the run that a config describes, or resumes it from its newest checkpoint."""

import dataclasses
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path

from lightning.pytorch import Callback, Trainer, seed_everything

from longhaul.configs import ConfigError, RunConfig
from longhaul.configs.loader import flatten, to_dict
from longhaul.datamodules.data_module import TokenDataModule
from longhaul.datamodules.files.untrusted import open_to_write
from longhaul.modules.pretraining import Pretraining
from longhaul.pipeline.checkpoints.folders import (
    holds_none,
    newest_checkpoint,
    newest_step,
    step_of,
)
from longhaul.pipeline.checkpoints.integrity import CheckpointError
from longhaul.pipeline.distributed.blocks import prepare_blocks
from longhaul.pipeline.distributed.launch import (
    check_launched,
    cluster_environment,
    disconnect_ranks,
    rank_devices,
)
from longhaul.pipeline.distributed.rank_environment import rank_environment
from longhaul.pipeline.distributed.strategies import build_strategy
from longhaul.pipeline.distributed.strategy import end_ranks
from longhaul.pipeline.evaluation.registry import check_tasks
from longhaul.pipeline.runs.data import check_epochs, check_same_data, recorded_corpus
from longhaul.pipeline.runs.done import Finished
from longhaul.pipeline.runs.folder import RunFolder, stored_config
from longhaul.pipeline.runs.initial_weights import load_initial_weights
from longhaul.pipeline.runs.trunk import branch_point
from longhaul.pipeline.system.compile_caches import use_private_caches
from longhaul.pipeline.system.devices import uses_gpu
from longhaul.pipeline.system.waiting import UPLOAD_S
from longhaul.pipeline.terminal.output import PlainFormatter
from longhaul.pipeline.tracking.description import Description, describe
from longhaul.pipeline.tracking.metrics_journal import JournalError
from longhaul.pipeline.tracking.mlflow_mirror import PARENT_TAG
from longhaul.pipeline.tracking.tracker import Status, Tracker
from longhaul.pipeline.training.callback import TrainingCallback
from longhaul.pipeline.training.post_mortem import explain
from longhaul.pipeline.training.preemption import EXIT_CHECKPOINTED, StopRequests
from longhaul.pipeline.training.progress import PROGRESS_LOGGER
from longhaul.pipeline.training.recorder import Recorder

logger = logging.getLogger(__name__)

# What training writes into a run folder.
_WRITTEN = (
    *("config.yaml", "environment.json", "data", "logs", "checkpoints", "evaluation"),
    *("mlflow_run_id", "DONE", "STOP", "STOPPED"),
)


def train(config: RunConfig, *callbacks: Callback) -> int:
    """Train up to the config's token budget, from the run's newest checkpoint if there is one.

    Args:
        callbacks: Lightning callbacks in addition to the TrainingCallback.

    Returns:
        0 if the run is finished, EXIT_CHECKPOINTED if it was stopped before, on request.
    """
    # Before anything starts CUDA or connects the ranks.
    os.environ.update(
        rank_environment(config, os.environ, gpu=uses_gpu(config.trainer.accelerator))
    )
    use_private_caches()
    seed_everything(config.trainer.seed, verbose=False)
    _silence_libraries()
    check_launched(config.trainer)
    check_tasks(config.evaluation.tasks, "evaluation.tasks")
    trainer = _build_trainer(config, callbacks)
    folder = RunFolder.of(config)
    folder.check_no_links(*_WRITTEN)
    folder.check_same_run(config)
    finished = _finished(config, folder, is_first=trainer.is_global_zero)
    if folder.config_file.exists():
        stored = stored_config(folder).data
        trained = newest_step(folder.checkpoints) * config.optim.tokens_per_update
        check_same_data(folder, config.data, stored, trained, may_be_gone=finished is not None)
    if config.trainer.branch_from is not None and holds_none(folder.checkpoints):
        branch_point(config)  # refused before anything starts
    if finished is not None:
        if trainer.is_global_zero:
            _show_finished(config, folder, finished)
        return 0
    with StopRequests(folder.path, config.trainer.stop_seconds) as requests:
        data = _open_data(config, folder, trainer)
        module, source = _build_initial_module(config, folder)
        if trainer.is_global_zero:
            return _train_on_rank_0(config, folder, trainer, module, source, data, requests)
        _fit(trainer, module, TrainingCallback(config, folder, data, requests, None))
    # Only rank 0 returns EXIT_CHECKPOINTED: launchers would take a non-zero status of another rank
    # for a failure.
    return 0


def _train_on_rank_0(
    config: RunConfig,
    folder: RunFolder,
    trainer: Trainer,
    module: Pretraining,
    source: Path | None,
    data: TokenDataModule,
    requests: StopRequests,
) -> int:
    """Train together with the other ranks, and record metrics and the run's status."""
    parameters = module.model.num_parameters()
    description = describe(config, parameters, data.corpus, data.validation_corpus)
    try:
        tracker = _new_tracker(config, folder, description)
    except JournalError as error:
        # A full disk, say, is not the fault of the config.
        wrong = FileNotFoundError, FileExistsError, NotADirectoryError, PermissionError
        if os.path.exists(folder.path) or not isinstance(error.__cause__, wrong):
            raise
        raise ConfigError(
            f"root: found {config.root}, in which no folder can be made, wanted one for runs: "
            f"{error}"
        ) from error
    recorder = Recorder(config, folder, tracker, data, parameters, source)
    callback = TrainingCallback(config, folder, data, requests, recorder)
    status: Status = "FAILED"
    finished: Finished | None = None
    try:
        with _log_to(folder.log_file, recorder):
            _fit(trainer, module, callback)
        if not callback.is_stopped:
            finished = Finished(module.progress.step, module.progress.tokens, is_tracked=False)
            # Marked before MLflow has everything: the other ranks have ended, so srun may end this
            # one at any moment.
            folder.mark_finished(finished)
        status = "KILLED" if finished is None else "FINISHED"
    except (KeyboardInterrupt, SystemExit):  # Lightning turns the first into the second
        status = "KILLED"
        saved = newest_step(folder.checkpoints)
        if (lost := module.progress.step - saved) > 0:
            logger.warning(
                "up to %d updates after step %d are not saved; SIGTERM, or a file %s, saves before "
                "the run ends",
                lost,
                saved,
                folder.path / "STOP",
            )
        raise KeyboardInterrupt from None
    finally:
        # What was refused before it began leaves the run's status as it was.
        ended = status if recorder.has_begun else None
        is_tracked = tracker.finish(ended, timeout_s=UPLOAD_S)
    if finished is None:
        print(
            f"longhaul: stopped after step {module.progress.step}, saved; "
            "run the same command to resume",
            file=sys.stderr,
        )
        return EXIT_CHECKPOINTED
    if is_tracked:
        folder.mark_finished(dataclasses.replace(finished, is_tracked=True))
    print(f"run {folder.path} is finished: {finished.tokens:,} tokens")
    return 0


def _open_data(config: RunConfig, folder: RunFolder, trainer: Trainer) -> TokenDataModule:
    """This rank's data, checked against the model's vocabulary before anything is written."""
    try:
        data = TokenDataModule(
            config.data,
            seed=config.trainer.seed,
            samples_per_update=config.samples_per_update,
            micro_batch=config.trainer.micro_batch,
            rank=trainer.global_rank,
            world_size=config.trainer.world_size,
            ranks_per_sample=config.trainer.context_parallel,
            pin_memory=trainer.strategy.root_device.type == "cuda",
            earlier=recorded_corpus(folder, "manifest"),
        )
        check_epochs(config, data.corpus, data.order)
        data.check_present()
    except FileNotFoundError as error:
        # The message about a source begins with its key.
        is_named = str(error).startswith("data.")
        raise ConfigError(str(error) if is_named else f"data: {error}") from error
    vocabulary = data.corpus.vocab_size
    if vocabulary > config.model.vocabulary:
        raise ConfigError(
            f"model.vocabulary: found {config.model.vocabulary}, wanted at least {vocabulary}, the "
            f"ids of {data.corpus.location}"
        )
    return data


def build_module(config: RunConfig) -> Pretraining:
    """The LightningModule that a config describes, with freshly initialised weights."""
    module = Pretraining(
        config.model,
        config.optim,
        accumulation=config.accumulation,
        samples_per_update=config.samples_per_update,
        max_tokens=config.trainer.max_tokens,
        train_only=config.trainer.train_only,
        num_sources=len(config.data.sources),
    )
    if config.trainer.context_parallel > 1:
        module.model.check_context_parallel()
    prepare_blocks(
        module.model,
        checkpointing=config.trainer.activation_checkpointing,
        compiled=config.trainer.is_compiled(on_gpu=uses_gpu(config.trainer.accelerator)),
    )
    return module


def _build_initial_module(config: RunConfig, folder: RunFolder) -> tuple[Pretraining, Path | None]:
    """The module that training starts with, and where trainer.start_from's weights were read."""
    module = build_module(config)
    # A run that has a checkpoint of its own, even a damaged one, or begins with all of another
    # run's, is resumed by TrainingCallback.
    is_new = holds_none(folder.checkpoints) and config.trainer.branch_from is None
    if config.trainer.start_from is None or not is_new:
        return module, None
    # Ranks may find different checkpoints here, if the run that writes them is still in progress.
    # The strategy then gives all ranks the weights of rank 0.
    return module, load_initial_weights(module.model, config.trainer.start_from)


def _fit(trainer: Trainer, module: Pretraining, callback: TrainingCallback) -> None:
    trainer.callbacks.append(callback)  # type: ignore[attr-defined]
    try:
        trainer.fit(module, datamodule=callback.data)
        disconnect_ranks()
    except Exception as error:
        logs = RunFolder.of(callback.config).log_file.parent
        failure = explain(error, callback.config, logs, trainer.global_rank)
        other_failures = callback.report_failure(failure)
        if other_failures is None:
            return  # Rank 0 failed with the same error; its message and exit status are the job's.
        if other_failures:
            raise RuntimeError(f"{other_failures}; {failure}") from error
        if failure is not error:
            raise failure from error
        raise
    finally:
        end_ranks(trainer)
        if callback.recorder:
            callback.recorder.end()


def _build_trainer(config: RunConfig, callbacks: Sequence[Callback]) -> Trainer:
    devices = rank_devices(config.trainer)
    return Trainer(
        callbacks=list(callbacks),
        accelerator=devices[0].type,
        strategy=build_strategy(config, devices),
        devices=1,  # Those of the other ranks, too, the strategy knows.
        num_nodes=config.trainer.nodes,
        precision=config.trainer.precision,
        # Sets what torch and cuBLAS need for it; the rest is in rank_environment.py.
        deterministic=config.trainer.deterministic,
        plugins=[cluster_environment()],
        max_epochs=1,  # The data loader ends with the token budget.
        # TrainingCallback does all of this itself, so that a resumed run is bit-identical.
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
    )


def _new_tracker(
    config: RunConfig, folder: RunFolder, description: Description | None = None
) -> Tracker:
    """The run's tracker; without a description it only uploads what was logged before."""
    parent = config.tracking.parent_run_id
    params, tags = dict[str, str](), dict[str, str]()
    if description is not None:
        values = {key: str(value) for key, value in flatten(to_dict(config)).items()}
        params = {**description.params, **values}
        tags = {**description.tags, **({} if parent is None else {PARENT_TAG: parent})}
    # The tracker locks the run's metrics journal, so only one process can train in a run folder.
    return Tracker(
        folder.path,
        uri=config.tracking.uri,
        experiment=config.tracking.experiment,
        run_name=config.name,
        params=params,
        tags=tags,
        datasets=() if description is None else description.datasets,
        artifacts=() if description is None else (folder.config_file, folder.environment_file),
    )


def _finished(config: RunConfig, folder: RunFolder, *, is_first: bool) -> Finished | None:
    """How the run finished; None if it has not, or has lost its last weights but not older ones.

    Every rank looks, since they are not connected yet, and the first one tells.

    Raises:
        CheckpointError: on the first rank, if all weights are lost.
    """
    finished = folder.finished()
    if finished is None or finished.tokens < config.trainer.max_tokens:
        return None
    newest = newest_checkpoint(folder.checkpoints)
    if newest is None and is_first:
        raise CheckpointError(
            f"run {folder.path} is finished, {finished.tokens:,} tokens, but found no intact "
            "checkpoint of it; to train it again, give the run another name or remove its folder"
        )
    if newest is None or step_of(newest) >= finished.step:
        return finished
    if is_first:
        logger.warning(
            "run %s was finished, but found no intact checkpoint of its last step, %d; training "
            "goes on from step %d",
            *(folder.path, finished.step, step_of(newest)),
        )
    return None


def _show_finished(config: RunConfig, folder: RunFolder, finished: Finished) -> None:
    """Say that the run is finished, and send MLflow what it has not got."""
    if finished.is_imported:
        print(
            f"run {folder.path} holds imported weights and trains nothing; a new run continues "
            f"them with trainer.start_from={folder.path}"
        )
        return
    if not finished.is_tracked:
        _upload_rest(config, folder, finished)
    print(f"run {folder.path} is finished: {finished.tokens:,} tokens")


def _upload_rest(config: RunConfig, folder: RunFolder, finished: Finished) -> None:
    """Upload to MLflow what was still missing there when the run ended."""
    tracker = _new_tracker(config, folder)
    tracker.start()
    if tracker.finish("FINISHED", timeout_s=UPLOAD_S):
        folder.mark_finished(dataclasses.replace(finished, is_tracked=True))


class _LogFile(logging.FileHandler):
    """A log that is created with its first line, and that may fail without ending the run."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, delay=True)
        self._path = path
        self._has_failed = False

    def _open(self) -> TextIOWrapper:
        return open(open_to_write(self._path, os.O_WRONLY | os.O_APPEND), "a", encoding="utf-8")

    def handleError(self, record: logging.LogRecord) -> None:
        """Say once that the file cannot be written."""
        if not self._has_failed:
            self._has_failed = True
            error = sys.exc_info()[1]
            reason = getattr(error, "strerror", None) or error
            print(f"longhaul: {self._path} cannot be written: {reason}", file=sys.stderr)

    def close(self) -> None:
        with suppress(OSError):
            super().close()


@contextmanager
def _log_to(file: Path, recorder: Recorder) -> Iterator[None]:
    """Within the context, log to a file as well, and the traceback of a failure after the start."""
    handler = _LogFile(file)
    handler.setFormatter(PlainFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    loggers = logging.getLogger(), PROGRESS_LOGGER
    for one in loggers:
        one.addHandler(handler)
    try:
        yield
    except Exception:
        if recorder.has_begun:
            # The terminal shows only one line; the file gets the traceback.
            PROGRESS_LOGGER.exception("the run failed")
        raise
    finally:
        for one in loggers:
            one.removeHandler(handler)
        handler.close()


def _silence_libraries() -> None:
    """Suppress advice about features of Lightning that this trainer does not use, and old names."""
    for package in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(package).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module=r"lightning\..*")
    # DeepSpeed, FSDP and context parallelism use functions that torch 2.13 has renamed.
    warnings.filterwarnings("ignore", message=".*is deprecated", module=r"torch\.distributed")
