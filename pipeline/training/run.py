"""Starts the run that a config describes, or resumes it."""

import dataclasses
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Callback, Trainer, seed_everything

from longhaul.configs import ConfigError, RunConfig
from longhaul.configs.loader import flatten, to_dict
from longhaul.datamodules.tokens import TokenDataModule
from longhaul.modules.pretraining import Pretraining
from longhaul.pipeline.evaluation.registry import check_tasks
from longhaul.pipeline.runs.folder import Finished, RunFolder
from longhaul.pipeline.runs.initial_weights import load_initial_weights
from longhaul.pipeline.system.environment import source_commit
from longhaul.pipeline.tracking.tracker import Status, Tracker
from longhaul.pipeline.training.blocks import prepare_blocks
from longhaul.pipeline.training.callback import Updates
from longhaul.pipeline.training.preemption import EXIT_CHECKPOINTED, StopRequests
from longhaul.pipeline.training.recorder import Books
from longhaul.pipeline.training.strategies import build_strategy, end_ranks

logger = logging.getLogger(__name__)

# A server that is away when a run ends gets this long; what is left is sent at the next start.
_SECONDS_TO_DRAIN = 30.0


def train(config: RunConfig, *callbacks: Callback) -> int:
    """Train to the config's budget, from the newest checkpoint of its run if there is one.

    Args:
        callbacks: called besides the trainer's own.

    Returns:
        0, or EXIT_CHECKPOINTED where the run was asked to stop before.
    """
    seed_everything(config.trainer.seed, verbose=False)
    _quieten_lightning()
    _check_meeting_place(config)
    check_tasks(config.evaluation.tasks, "evaluation.tasks")
    trainer = _build_trainer(config, callbacks)
    folder = RunFolder.of(config)
    folder.check_same_run(config)
    finished = folder.finished()
    if finished is not None and finished.tokens >= config.trainer.max_tokens:
        if trainer.is_global_zero:
            if not finished.is_tracked:
                _track_to_the_end(config, folder, finished)
            print(f"run {folder.path} is finished: {finished.tokens:,} tokens")
        return 0
    with StopRequests(folder.path, config.trainer.stop_seconds) as requests:
        data = _open_data(config, trainer)
        module, source = _begin(config, folder)
        if trainer.is_global_zero:
            return _lead(config, folder, trainer, module, source, data, requests)
        _fit(trainer, module, Updates(config, folder, data, requests, None))
    # Rank 0's status is the job's: launchers take one that is not 0 for a failure of this rank.
    return 0


def _lead(
    config: RunConfig,
    folder: RunFolder,
    trainer: Trainer,
    module: Pretraining,
    source: Path | None,
    data: TokenDataModule,
    requests: StopRequests,
) -> int:
    """What rank 0 does: train with the others, and keep the run's books."""
    tracker = _new_tracker(config, folder)
    status: Status | None = None
    finished: Finished | None = None
    try:
        folder.adopt(config)
        status = "FAILED"
        tracker.start()
        updates = Updates(config, folder, data, requests, Books(config, folder, tracker))
        with _logging_to(folder.log_file):
            if source is not None:
                logger.info("the run begins with the weights of %s", source)
            _fit(trainer, module, updates)
        if not updates.is_stopped:
            finished = Finished(module.progress.step, module.progress.tokens, is_tracked=False)
            # Before MLflow has it all: the other ranks are gone, and srun may end this one.
            folder.mark_finished(finished)
        status = "KILLED" if finished is None else "FINISHED"
    except (KeyboardInterrupt, SystemExit):  # Lightning makes the second of the first
        status = "KILLED"
        raise KeyboardInterrupt from None
    finally:
        is_tracked = tracker.finish(status, timeout_s=_SECONDS_TO_DRAIN)
    if finished is None:
        print(
            f"longhaul: stopped after step {module.progress.step}, saved; the same command goes on",
            file=sys.stderr,
        )
        return EXIT_CHECKPOINTED
    if is_tracked:
        folder.mark_finished(dataclasses.replace(finished, is_tracked=True))
    print(f"run {folder.path} is finished: {finished.tokens:,} tokens")
    return 0


def _open_data(config: RunConfig, trainer: Trainer) -> TokenDataModule:
    """The data of this rank, checked against the model before anything is written."""
    try:
        data = TokenDataModule(
            config.data,
            seed=config.trainer.seed,
            samples_per_update=config.samples_per_update,
            micro_batch=config.trainer.micro_batch,
            rank=trainer.global_rank,
            world_size=config.trainer.world_size,
            ranks_a_sample=config.trainer.context_parallel,
            pin_memory=torch.cuda.is_available(),
        )
    except FileNotFoundError as error:
        raise ConfigError(f"data: {error}") from error
    vocabulary = data.manifest.vocab_size
    if vocabulary > config.model.vocabulary:
        raise ConfigError(
            f"model.vocabulary: found {config.model.vocabulary}, wanted at least {vocabulary}, the "
            f"ids of {config.data.manifest}"
        )
    return data


def build_module(config: RunConfig) -> Pretraining:
    """The model that a config describes, and its training, before any weights are read."""
    module = Pretraining(
        config.model,
        config.optim,
        accumulation=config.accumulation,
        samples_per_update=config.samples_per_update,
        max_tokens=config.trainer.max_tokens,
        train_only=config.trainer.train_only,
    )
    if config.trainer.context_parallel > 1:
        module.model.check_parts()
    prepare_blocks(
        module.model,
        checkpoint_every=config.trainer.activation_checkpointing,
        compiled=config.trainer.compile,
    )
    return module


def _begin(config: RunConfig, folder: RunFolder) -> tuple[Pretraining, Path | None]:
    """The model that a run begins with, and the checkpoint that a new run has its weights from."""
    module = build_module(config)
    # Checkpoints of the run's own, damaged ones too, decide what happens in Updates.
    is_new = not any(folder.checkpoints.glob("step-*"))
    if config.trainer.start_from is None or not is_new:
        return module, None
    # Ranks that find another checkpoint, since its run goes on, get rank 0's weights.
    return module, load_initial_weights(module.model, config.trainer.start_from)


def _fit(trainer: Trainer, module: Pretraining, updates: Updates) -> None:
    trainer.callbacks.append(updates)  # type: ignore[attr-defined]
    try:
        trainer.fit(module, datamodule=updates.data)
    except Exception as error:
        others = updates.end_watch(error)
        if others is None:
            return  # Rank 0 failed alike, and its line and status are the job's.
        if others:
            raise RuntimeError(f"{others}; {error}") from error
        raise
    finally:
        end_ranks(trainer)
        if updates.books:
            updates.books.end()


def _check_meeting_place(config: RunConfig) -> None:
    """Refuse nodes that nothing tells of each other: they would wait for half an hour."""
    nodes = config.trainer.nodes
    if nodes > 1 and not SLURMEnvironment.detect() and "MASTER_ADDR" not in os.environ:
        raise ConfigError(
            f"trainer.nodes: found {nodes} outside of a Slurm job, wanted 1, or MASTER_ADDR, "
            "MASTER_PORT and NODE_RANK in each node's environment"
        )


def _build_trainer(config: RunConfig, callbacks: Sequence[Callback]) -> Trainer:
    return Trainer(
        callbacks=list(callbacks),
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        strategy=build_strategy(config),
        devices=config.trainer.devices,
        num_nodes=config.trainer.nodes,
        precision=config.trainer.precision,  # type: ignore[arg-type]
        # Its own way to save and requeue would do both within the signal's handler.
        plugins=[SLURMEnvironment(auto_requeue=False)] if SLURMEnvironment.detect() else None,
        max_epochs=1,  # The loader ends with the budget.
        # Everything below is done by Updates, which survives a restart to the bit.
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
    )


def _new_tracker(config: RunConfig, folder: RunFolder) -> Tracker:
    parent = config.tracking.parent_run_id
    # Its journal is locked while it is open, so only one process trains in a folder.
    return Tracker(
        folder.path,
        uri=config.tracking.uri,
        experiment=config.tracking.experiment,
        run_name=config.name,
        params={key: str(value) for key, value in flatten(to_dict(config)).items()},
        tags={
            "longhaul.attention": ",".join(config.model.kinds),
            "longhaul.commit": str(source_commit()),
            **({} if parent is None else {"mlflow.parentRunId": parent}),
        },
        artifacts=[folder.config_file, folder.environment_file],
    )


def _track_to_the_end(config: RunConfig, folder: RunFolder, finished: Finished) -> None:
    """Send MLflow what it had not taken when the run ended."""
    tracker = _new_tracker(config, folder)
    tracker.start()
    if tracker.finish("FINISHED", timeout_s=_SECONDS_TO_DRAIN):
        folder.mark_finished(dataclasses.replace(finished, is_tracked=True))


@contextmanager
def _logging_to(file: Path) -> Iterator[None]:
    """Everything logged, and the traceback of a failure, also in a file."""
    handler = logging.FileHandler(file)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    except Exception:
        # The user sees one line; who looks for the cause finds it here.
        root.removeHandler(handler)
        quiet = logging.Logger("longhaul.failure")
        quiet.addHandler(handler)
        quiet.exception("the run failed")
        raise
    finally:
        root.removeHandler(handler)
        handler.close()


def _quieten_lightning() -> None:
    """Lightning's advice about parts of it that this trainer does not use."""
    for package in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(package).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module=r"lightning\..*")
