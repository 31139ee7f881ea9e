"""Reads the runs of an MLflow experiment: their configs, losses, speeds and evaluations."""

import dataclasses
import fnmatch
import logging
import math
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from longhaul.configs import ConfigError, RunConfig, load_stored_config
from longhaul.datamodules.files.plain_text import plain
from longhaul.datamodules.files.untrusted import one_line, parse_json, read_regular
from longhaul.datamodules.urls import SQLITE
from longhaul.modules.meta_device import build_on_meta
from longhaul.pipeline.evaluation.labels import BYTES_PER_TOKEN, Label, parse_label
from longhaul.pipeline.evaluation.tables import MOST_LOSS
from longhaul.pipeline.planning.sizes import attention_layers, state_bytes
from longhaul.pipeline.reporting.tables import Evaluated, is_newer, read_tables
from longhaul.pipeline.system.environment import Environment
from longhaul.pipeline.terminal.progress import shows_bars
from longhaul.pipeline.tracking.mlflow_limits import short_error, without_secrets
from longhaul.pipeline.tracking.mlflow_run import (
    ENVIRONMENT,
    absolute_uri,
    check_answers,
    check_readable,
    load_mlflow,
)

if TYPE_CHECKING:
    from mlflow.entities import Run as MlflowRun
    from mlflow.tracking import MlflowClient

logger = logging.getLogger(__name__)

# The metrics of tasks that write no table, under what `metric_prefix` puts before them.
_METRIC = re.compile(r"(?P<label>evaluation(?:/[^/]+)*?)/(?:bigram_loss|lm-eval/(?P<lm_eval>.+))")

_NAMES_SHOWN = 20
_MOST_BYTES = 64 << 20  # of a config or a table
_MOST_TOKENS = 1 << 60  # read by one run
_MOST_SPEED = 1e15  # tokens per second


@dataclass(frozen=True)
class Point:
    """One recorded value."""

    step: int
    tokens: int
    value: float  # NaN where it was none from 0 to MOST_LOSS


@dataclass(frozen=True, order=True)
class Data:
    """The shards that a run is trained on."""

    name: str
    """The last two folders of their path or URL."""

    sha256: str
    """What identifies them, wherever they are: the hash of all shards' hashes."""


@dataclass(frozen=True)
class Run:
    """One training run."""

    run_id: str
    name: str
    status: str
    """MLflow's status: FINISHED, RUNNING, FAILED, KILLED, ..."""

    commit: str
    hardware: str
    data: Data
    tokenizer: str
    """Its name in the corpus; empty where MLflow does not know it."""

    validation_data: str
    """What identifies the validation text: the beginning of its shards' hash, and its tokens."""

    bytes_per_token: float
    """Of the validation text; NaN where it has not been counted."""

    config: RunConfig
    config_text: str
    losses: list[Point]
    """Training losses in nats per token, by step."""

    validation: list[Point]
    speed: float
    """Median tokens per second of all its devices together; NaN before the first update."""

    num_parameters: int
    state_bytes: int
    """States of one sequence in half precision; for caches, after as many tokens as in training."""

    evaluations: dict[str, list[Evaluated]]
    """By task: the newest result for each scaling of positions and each text.

    The rows of bigram and lm-eval, which write no tables, are those of `metric_rows`.
    """

    left_out: list[str]
    """A message for each table and metric that cannot be read."""

    source_losses: dict[str, list[Point]] = field(default_factory=dict)
    """Training losses of each of its sources, by their names."""

    source_validation: dict[str, list[Point]] = field(default_factory=dict)

    @property
    def is_finished(self) -> bool:
        return self.status == "FINISHED"

    @property
    def kind(self) -> str:
        """The kind of attention, or all kinds of the layers."""
        return "+".join(self.config.model.kinds)

    @property
    def seed(self) -> int:
        return self.config.trainer.seed

    @property
    def context(self) -> int:
        return self.config.data.context

    @property
    def tokens(self) -> int:
        """Tokens trained on so far."""
        return self.losses[-1].tokens if self.losses else 0

    @property
    def budget(self) -> int:
        """Tokens when training ends, or those that a finished run has been validated after."""
        if self.is_finished and self.validation:
            return self.validation[-1].tokens
        return self.config.num_updates * self.config.optim.tokens_per_update

    @property
    def bits_per_byte(self) -> float:
        """The final loss by byte of text, which runs with other tokenizers share."""
        return self.final_loss / math.log(2) / self.bytes_per_token

    @property
    def final_loss(self) -> float:
        """Loss of the last validation in nats per token; NaN before the first."""
        return self.validation[-1].value if self.validation else float("nan")


def read_runs(
    uri: str, experiment: str, names: Sequence[str] = (), search: str = ""
) -> tuple[list[Run], list[str]]:
    """The runs of an experiment, and a message for each run or table that cannot be read.

    Args:
        uri: of the store.
        experiment: its name.
        names: of runs, in which * and ? stand for others; none means all.
        search: what MLflow filters runs by; empty means all.

    Raises:
        ValueError: there is no such store, experiment or run, MLflow does not understand the
            search, or none of the runs has finished.
        RuntimeError: MLflow cannot be reached.
    """
    uri = _checked_uri(uri)
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    check_answers(uri, "--uri")
    load_mlflow(uri)
    runs, unread = [], []
    with _unreachable_as_runtime_error(uri):
        from mlflow.tracking import MlflowClient  # See load_mlflow.

        client = MlflowClient(uri)
        every = _training_runs(client, _experiment_id(client, experiment), search)
        mlflow_runs = _with_names(every, names)
        _check_any_finished(experiment, [str(run.info.status) for run in mlflow_runs])
        logger.info("reading %d runs", len(mlflow_runs))
        for run in tqdm(
            mlflow_runs, unit=" runs", disable=not shows_bars(sys.stderr), delay=5, leave=False
        ):
            try:
                read = _read(client, run)
            except _Unreadable as error:
                unread.append(plain(without_secrets(f"{run.info.run_name}: {error}")))
            else:
                runs.append(read)
                unread += [f"{read.name}: {plain(without_secrets(line))}" for line in read.left_out]
    _check_any_finished(experiment, [run.status for run in runs])
    return sorted(runs, key=lambda run: (run.context, run.name, run.run_id)), unread


@dataclass(frozen=True)
class _Profile:
    """What a training logs of a set of shards, as far as it is read here."""

    tokenizer: str


class _Unreadable(Exception):
    """A run lacks something that the report needs."""


@contextmanager
def _unreachable_as_runtime_error(uri: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, OSError):
        raise
    except Exception as error:
        address, reason = without_secrets(uri), without_secrets(short_error(error))
        raise RuntimeError(f"--uri: {address} cannot be read: {reason}") from error


def _checked_uri(uri: str) -> str:
    """The absolute URI; ValueError without the database, RuntimeError if it cannot be read."""
    uri = absolute_uri(uri)
    if uri.startswith(SQLITE):
        path = Path(uri.removeprefix(SQLITE))
        if not path.is_file():
            raise ValueError(f"--uri: found no file {path}, wanted MLflow's database or a server")
        with _unreachable_as_runtime_error(uri):
            check_readable(path)
    return uri


def _experiment_id(client: "MlflowClient", name: str) -> str:
    found = client.get_experiment_by_name(name)
    if found is not None and found.lifecycle_stage == "active":
        return str(found.experiment_id)
    # MLflow makes the first one, and most stores hold nothing in it.
    known = sorted(
        one.name
        for one in client.search_experiments()
        if one.experiment_id != "0" or client.search_runs(["0"], max_results=1)
    )
    names = ", ".join(map(repr, known[:_NAMES_SHOWN]))
    more = f" and {len(known) - _NAMES_SHOWN} more" if len(known) > _NAMES_SHOWN else ""
    wanted = f"wanted one of {names}{more}" if known else "and no experiment has a run"
    raise ValueError(f"EXPERIMENT: found {name!r}, {wanted}")


def _with_names(runs: "Sequence[MlflowRun]", names: Sequence[str]) -> "list[MlflowRun]":
    """The runs with such names; ValueError for a name that none has."""
    every = [str(run.info.run_name) for run in runs]
    for name in names:
        if not fnmatch.filter(every, name):
            known = ", ".join(map(repr, sorted(set(map(plain, every)))[:_NAMES_SHOWN]))
            raise ValueError(f"--runs: found {name!r}, wanted some of {known or 'no runs'}")
    chosen = {one for name in names or ["*"] for one in fnmatch.filter(every, name)}
    return [run for run, name in zip(runs, every, strict=True) if name in chosen]


def _training_runs(client: "MlflowClient", experiment_id: str, search: str) -> "list[MlflowRun]":
    """All training runs of an experiment, without parents of sweeps, which only group runs."""
    from mlflow.exceptions import MlflowException  # See load_mlflow.

    runs: list[MlflowRun] = []
    token = None
    while token is None or token:
        try:
            page = client.search_runs([experiment_id], search, page_token=token)
        except MlflowException as error:
            if not search or error.error_code != "INVALID_PARAMETER_VALUE":
                raise
            raise ValueError(f"--filter: found {search!r}: {one_line(error)}") from None
        runs += [run for run in page if "longhaul.attention" in run.data.tags]
        token = page.token or ""
    return runs


def _check_any_finished(experiment: str, statuses: Sequence[str]) -> None:
    if "FINISHED" in statuses:
        return
    counts = {status: statuses.count(status) for status in sorted(set(statuses))}
    found = ", ".join(f"{count} {status.lower()}" for status, count in counts.items()) or "no runs"
    raise ValueError(f"EXPERIMENT {experiment!r}: found {found}, wanted a finished run")


def _read(client: "MlflowClient", run: "MlflowRun") -> Run:
    run_id = run.info.run_id
    with tempfile.TemporaryDirectory() as folder:
        is_local = run.info.artifact_uri.startswith(("/", "file:"))

        def fetch(path: str) -> str:
            # MLflow copies a file that it is asked for: of a device the copy would have no end.
            wanted = ("", None) if is_local else (path, folder)
            file = Path(client.download_artifacts(run_id, *wanted), path if is_local else "")
            return read_regular(file, _MOST_BYTES).decode()

        def names(path: str) -> list[str]:
            # MLflow lists no folder in which one link leads nowhere.
            if is_local:
                found = Path(client.download_artifacts(run_id, ""), path)
                return sorted(os.listdir(found)) if os.path.lexists(found) else []
            return [Path(one.path).name for one in client.list_artifacts(run_id, path)]

        config, text = _config(fetch, Path(folder))
        evaluations, left_out = read_tables(names, fetch, config.data.context)
        hardware = _hardware(fetch)

    def history(name: str) -> list[tuple[int, float]]:
        found = client.get_metric_history(run_id, name) if name in metrics else []
        return sorted({one.step: float(one.value) for one in found}.items())

    model = build_on_meta(config.model)
    metrics, params = run.data.metrics, run.data.params
    # Where MLflow knows no hash, only runs that read the same path are taken to share their data.
    data = (
        params.get(name, "+".join(config.data.manifests("manifest").values()))
        for name in ("data", "data_sha256")
    )
    measured, unmeasured = _measured(history, metrics, config.data.context)
    speeds = [value for _, value in history("train/tokens_per_second")]
    possible = [speed for speed in speeds if 0 < speed <= _MOST_SPEED]
    losses = _points(history("curves/train_loss"), config.optim.tokens_per_update)
    validation = _points(history("curves/validation_loss"), config.optim.tokens_per_update)
    of_sources = [
        {
            name: _points(history(f"{group}/loss/{name}"), config.optim.tokens_per_update)
            for name in config.data.sources
        }
        for group in ("train", "validation")
    ]
    left_out += unmeasured
    tokenizer, validation_data = _datasets(run, config)
    if speeds and not possible:
        left_out.append(f"train/tokens_per_second: found {speeds[-1]:g}, wanted more than 0")
    for name, decisive in (("validation_loss", validation[-1:]), ("train_loss", losses)):
        if decisive and all(math.isnan(point.value) for point in decisive):
            left_out.append(_no_loss(f"curves/{name}", metrics))
    return Run(
        run_id=run_id,
        name=plain(run.info.run_name or run_id),
        status=str(run.info.status),
        commit=plain(params.get("commit", "unknown")),
        hardware=hardware,
        data=Data(*map(plain, data)),
        tokenizer=tokenizer,
        validation_data=validation_data,
        bytes_per_token=_bytes_per_token(tokenizer, metrics),
        config=config,
        config_text=text,
        losses=losses,
        validation=validation,
        speed=statistics.median(possible) if possible else math.nan,
        num_parameters=model.num_parameters(),
        state_bytes=state_bytes(attention_layers(model), config.data.context),
        evaluations=evaluations | measured,
        left_out=left_out,
        source_losses=of_sources[0],
        source_validation=of_sources[1],
    )


def _config(fetch: Callable[[str], str], folder: Path) -> tuple[RunConfig, str]:
    file = folder / "config.yaml"
    try:
        text = fetch(file.name)
        file.write_text(text)
    except Exception as error:
        raise _Unreadable(f"config.yaml is not in MLflow: {short_error(error)}") from error
    try:
        return load_stored_config(file), text
    except ConfigError as error:
        reason = str(error).removeprefix(f"{file}: ")
        # It may be of another version, or of a kind whose file is not here.
        raise _Unreadable(f"config.yaml cannot be read here: {reason}") from error


def _datasets(run: "MlflowRun", config: RunConfig) -> tuple[str, str]:
    """The tokenizer's name, and what identifies the validation text."""
    tokenizer = ""
    digests = list(config.data.manifests("validation_manifest").values())
    logged = []
    for one in run.inputs.dataset_inputs if run.inputs else ():
        try:
            tokenizer = parse_json(_Profile, one.dataset.profile or "{}", "profile").tokenizer
        except ValueError:  # It was logged by something else, or before profiles named it.
            continue
        if any(tag.value == "validation" for tag in one.tags):
            logged.append(one.dataset.digest)
    digest = "+".join(sorted(logged) or digests)
    return plain(tokenizer), plain(f"{digest} {config.data.validation_tokens}")


def _bytes_per_token(tokenizer: str, metrics: Mapping[str, float]) -> float:
    if tokenizer == "bytes":
        return 1.0
    value = metrics.get(BYTES_PER_TOKEN, math.nan)
    return value if 0 < value <= _MOST_BYTES else math.nan


def _hardware(fetch: Callable[[str], str]) -> str:
    try:
        found = parse_json(Environment, fetch("environment.json"), "environment.json")
    except Exception:  # Only a note below a figure needs it, so the run is kept without.
        return "unknown"
    return next(iter(found.accelerators), found.processor) or "unknown"


def _points(history: Sequence[tuple[int, float]], tokens_per_update: int) -> list[Point]:
    # All updates have the same number of tokens; a resumed run cannot change it.
    return [
        Point(step, step * tokens_per_update, value if 0 <= value <= MOST_LOSS else math.nan)
        for step, value in history
        if 0 <= step <= _MOST_TOKENS // tokens_per_update
    ]


def _no_loss(name: str, metrics: Mapping[str, float]) -> str:
    # MLflow's databases store infinity as the largest float.
    return f"{name}: found {metrics[name]:g} at last, wanted 0 to {MOST_LOSS:g}"


def _measured(
    history: Callable[[str], list[tuple[int, float]]], metrics: Mapping[str, float], context: int
) -> tuple[dict[str, list[Evaluated]], list[str]]:
    """The results of the tasks that log numbers and write no table: bigram and lm-eval.

    And a message for each that cannot be read.
    """
    newest: dict[tuple[str, str], tuple[Label, dict[str, float]]] = {}
    left_out = []
    for name in metrics:
        found = _METRIC.fullmatch(name)
        label = found and parse_label("-".join(["step-0", *found["label"].split("/")[1:]]))
        if not found or label is None:
            continue
        task = "lm-eval" if found["lm_eval"] else "bigram"
        step, value = history(name)[-1]
        if task == "bigram" and not 0 <= value <= MOST_LOSS:
            left_out.append(_no_loss(name, metrics))
            continue
        label = dataclasses.replace(label, step=step)
        key = task, label.text
        if key not in newest or is_newer(label, newest[key][0], context):
            newest[key] = label, {}
        if newest[key][0] == label:
            newest[key][1][found["lm_eval"] or "loss_nats"] = value
    measured: dict[str, list[Evaluated]] = {"bigram": [], "lm-eval": []}
    for (task, _), (label, values) in sorted(newest.items(), key=lambda item: item[0]):
        measured[task].append(Evaluated(label, metric_rows(values)))
    return measured, left_out


def metric_rows(values: Mapping[str, float]) -> list[dict[str, Any]]:
    """A row for each metric, with its standard error where lm_eval has logged one (NaN if not)."""
    return [
        {
            "metric": name,
            "value": value,
            "standard_error": values.get(re.sub(r"^([^/]+/[^/]+)", r"\1_stderr", name), math.nan),
        }
        for name, value in sorted(values.items())
        if "_stderr" not in name
    ]
