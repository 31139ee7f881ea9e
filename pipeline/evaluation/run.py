"""Measures a checkpoint on held-out text, or on synthetic tasks."""

import dataclasses
import logging
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from longhaul.datamodules.config import DataConfig
from longhaul.datamodules.corpus import corpus_of
from longhaul.datamodules.named import is_named_store
from longhaul.pipeline.evaluation.labels import label, results_folder
from longhaul.pipeline.evaluation.options import TaskOptions
from longhaul.pipeline.evaluation.registry import TASKS
from longhaul.pipeline.evaluation.results import Results
from longhaul.pipeline.evaluation.task import TaskResult
from longhaul.pipeline.evaluation.windows import with_context
from longhaul.pipeline.runs.data import check_same_data, recorded_corpus, with_moved_data
from longhaul.pipeline.runs.folder import stored_config
from longhaul.pipeline.runs.named_keys import READ, check_named
from longhaul.pipeline.runs.ranks import Ranks, measure_together
from longhaul.pipeline.runs.trained_model import (
    NamedModel,
    TrainedModel,
    find_checkpoint,
    load_trained_model,
)
from longhaul.pipeline.system.waiting import EVALUATION_UPLOAD_S
from longhaul.pipeline.tracking.mlflow_limits import without_secrets
from longhaul.pipeline.tracking.tracker import Tracker

logger = logging.getLogger(__name__)

# What an evaluation writes into a run folder.
_WRITTEN = ("evaluation", "logs", "mlflow_run_id")


def check_options(names: Sequence[str], options: Mapping[str, Any], devices: int) -> None:
    """Raise ValueError for options that are of no use for these tasks, whatever the model is."""
    if devices < 1:
        raise ValueError(f"--devices: found {devices}, wanted 1 or more")
    if torch.cuda.is_available() and devices > torch.cuda.device_count():
        raise ValueError(
            f"--devices: found {devices}, wanted at most {torch.cuda.device_count()}, the "
            "number of GPUs"
        )
    _check_options_are_read(names, options)
    for file in options.get("text", ()):
        if not file.is_file():
            raise ValueError(f"--text: found no file {file}, wanted text in UTF-8")


def evaluate_checkpoint(
    named: NamedModel,
    names: Sequence[str],
    options: Mapping[str, Any],
    *,
    data: str | None,
    devices: int,
    again: bool,
) -> None:
    """Load a checkpoint in one process per device, and run the tasks in all of them together.

    Args:
        named: the checkpoint, and how its positions are scaled.
        names: of the tasks.
        options: values of fields of the tasks' options, which `check_options` has checked.
        data: where the run's data are now; None means where its config says.
        devices: number of processes.
        again: repeat tasks that have results.

    Raises:
        ValueError: there is no such checkpoint, or an option is of no use with it.
        OSError: the checkpoint is damaged, or results could not be written.
        RuntimeError: one of the other processes failed.
    """
    folder, _ = find_checkpoint(named.run_or_checkpoint)
    folder.check_no_links(*_WRITTEN)
    config = stored_config(folder)
    typed: set[str] = set()
    if data is not None:
        config, typed = with_moved_data(folder, config, data)
    check_named(config, folder.path, READ, "give --data a folder on this machine", typed)
    # Not every task reads them. They must not be other data than those of the run.
    check_same_data(folder, config.data, config.data, may_be_gone=True)
    measure_together(devices, _load_and_evaluate, named, names, options, config.data, again)


def _check_options_are_read(names: Sequence[str], options: Mapping[str, Any]) -> None:
    """Raise ValueError for an option that the tasks do not read."""
    for field in options:
        others = [name for name in names if field not in TASKS[name].options]
        # Names of results contain the text and the context, so all tasks must read these two.
        if len(others) == len(names) or (others and field in ("text", "context")):
            option = "--" + field.replace("_", "-")
            if f"{field}s" in TASKS[others[0]].options:
                raise ValueError(
                    f"{option}: found with {','.join(names)}, wanted {option}s for {others[0]}, or "
                    "a command for each"
                )
            raise ValueError(
                f"{option}: found with {others[0]}, which does not read it; wanted other tasks"
            )


def _load_and_evaluate(
    ranks: Ranks,
    named: NamedModel,
    names: Sequence[str],
    options: Mapping[str, Any],
    data: DataConfig,
    again: bool,
) -> None:
    trained = load_trained_model(*named, ranks=ranks)
    trained = dataclasses.replace(trained, config=dataclasses.replace(trained.config, data=data))
    if "positions" in names:
        _check_scaling_shows(trained, options.get("context"))
    if "context" in options:
        config = with_context(trained.config, options["context"])
        trained = dataclasses.replace(trained, config=config)
    evaluate(trained, names, options, again=again)


def evaluate(
    trained: TrainedModel,
    names: Sequence[str],
    options: Mapping[str, Any],
    tracker: Tracker | None = None,
    *,
    again: bool = False,
) -> None:
    """Run the tasks; write the result of each to disk and to MLflow as soon as it is there.

    All of `trained.ranks` call this with the same arguments. Only the first rank writes. `options`
    are values of fields of the tasks' options. During training, `tracker` is the run's own.

    Raises:
        ValueError: before the first task runs, one of them cannot measure this model, or not with
            these options.
    """
    ranks = trained.ranks
    wanted = {name: task.options_from(options) for name, task in TASKS.items() if name in names}
    if not ranks.is_first:
        (missing,) = ranks.gather(list[list[str]]())
        _check_can_be_measured(trained, missing, wanted)
        for name in missing:
            if wanted[name].is_shared:
                with tempfile.TemporaryDirectory() as scratch:
                    TASKS[name].module.measure(trained, wanted[name], Path(scratch))
        return
    # The text, which the folder's name contains, is an option of all of these tasks or of none.
    folder = results_folder(trained, next(iter(wanted.values())))
    results = Results(folder, _validation_text_id(trained))
    stored = {n: None if again else results.stored(n, own) for n, own in wanted.items()}
    (missing,) = ranks.gather([[name for name, result in stored.items() if result is None]])
    _check_can_be_measured(trained, missing, wanted)
    if tracker is None:
        print(f"step {trained.step:,}, {trained.checkpoint}")
    for name, own in wanted.items():
        result = stored[name]
        if result is not None:
            print(f"{name}: results are already there; --again repeats it")
            results.summarise()  # results.json may be damaged or absent
        else:
            # The earlier result stays until there is a new one.
            with tempfile.TemporaryDirectory() as scratch:
                found = TASKS[name].module.measure(trained, own, Path(scratch))
                result = results.store(name, found)
            _log(trained, own, result, results.summary, tracker)
            # Only after logging, since a complete result is not logged again.
            results.mark_complete(name, own, result)
        _show(result)


def _check_can_be_measured(
    trained: TrainedModel, names: Sequence[str], options: Mapping[str, TaskOptions]
) -> None:
    for name in names:
        TASKS[name].module.check(trained, options[name])


def _validation_text_id(trained: TrainedModel) -> str:
    """What identifies the validation text: its shards, and how much of them is read."""
    data = trained.config.data
    if not data.manifests("validation_manifest"):
        return ""
    recorded = recorded_corpus(trained.folder, "validation_manifest")
    corpus = recorded or corpus_of(data, "validation_manifest")
    return f"{data.validation_tokens} tokens of {corpus.fingerprint}"


def _show(result: TaskResult) -> None:
    width = max(map(len, result.values), default=0)
    for name, value in result.values.items():
        unit = " nats per token" if "loss" in name.rpartition("/")[2] else ""
        print(f"{name:<{width}}  {value:.4f}{unit}")
    for file in result.files:
        print(f"written: {file}")


def _check_scaling_shows(trained: TrainedModel, context: int | None) -> None:
    """Raise ValueError if windows are so short that dynamic_ntk would change nothing."""
    positions = trained.positions
    if positions.name == "dynamic_ntk" and (context or positions.context) <= positions.context:
        raise ValueError(
            f"--context: found {context or positions.context} with dynamic_ntk, which changes "
            f"nothing up to the training context; wanted more than {positions.context}"
        )


def _log(
    trained: TrainedModel,
    options: TaskOptions,
    result: TaskResult,
    summary: Path,
    tracker: Tracker | None,
) -> None:
    """Log files to the MLflow run, and numbers to the checkpoint that they belong to."""
    folder, tracking = trained.folder, trained.config.tracking
    own = tracker or Tracker(
        folder.path,
        uri=tracking.uri,
        experiment=tracking.experiment,
        run_name=trained.config.name,
        is_training=False,
    )
    is_sent = tracker is not None or is_named_store(tracking.uri, folder.path)
    if tracker is None and is_sent:
        own.start()
    elif not is_sent:
        logger.warning(
            "the config of %s names MLflow at %s, which you have not named before: nothing is sent "
            "there, and the numbers are kept in %s; MLFLOW_TRACKING_URI names it",
            *(folder.path, without_secrets(tracking.uri), folder.path / "logs/evaluation.jsonl"),
        )
    own.log_checkpoint(trained.checkpoint, trained.step, result.values)
    for file in (summary, *result.files):
        own.log_artifact(file, f"evaluation/{label(trained, options)}")
    if tracker is None:
        own.finish(None, timeout_s=EVALUATION_UPLOAD_S)
