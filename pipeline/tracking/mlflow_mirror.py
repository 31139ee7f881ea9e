"""Uploads a run's metrics journal to its MLflow run, each line once.

It relies on this behaviour of mlflow 3.17.2, observed on sqlite and with `mlflow server`:

- Logging a metric again with the same (key, value, timestamp, step) adds no row. This holds for NaN
  too, and for batches that also contain new metrics. Lines of the journal never change, so it
  suffices to send each line at least once, and the position of the upload may be stored late.
- `log_batch` writes params, metrics and tags in that order, each in a transaction of its own. Tags
  sent with metrics are never stored before them, so the position of the upload is stored in tags.
- MLflow refuses a changed param, and with it all params of the batch. It accepts metrics for a
  finished run, but not for a deleted one. Values above 6,000 characters (params) or 8,000 (tags)
  are truncated.
- `log_inputs` again with a dataset of the same name and digest adds nothing.
- A thousand rows take 0.07 to 0.2 s of this process's time on sqlite, 0.02 s with a server.
"""

import json
import logging
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from longhaul.datamodules.files.untrusted import copy_regular, inner_path
from longhaul.datamodules.named import is_named
from longhaul.datamodules.urls import SQLITE, is_remote, local_path
from longhaul.pipeline.tracking.metrics_journal import Journal, parsed_positions, parts, position
from longhaul.pipeline.tracking.mlflow_limits import (
    MAX_NAME_CHARACTERS,
    MAX_PARAM_CHARACTERS,
    MAX_TAG_CHARACTERS,
    clean_name,
    is_refusal,
    short_error,
    truncate,
)
from longhaul.pipeline.tracking.mlflow_run import check_active, checked_parent, open_run

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

logger = logging.getLogger(__name__)

# A request may hold 1,000 metrics and tags together, of these 100 tags. Given more, the client
# makes several requests and sends the tags with the first, so the position would be stored too
# early.
MAX_METRICS = 900
PARENT_TAG = "mlflow.parentRunId"
CHECKPOINT_TAG = "longhaul.checkpoint"
CHANGED_TAG = "config_changed."
UPLOADED_TAG = "longhaul.uploaded."  # and the journal's name; a single tag, since people read tags
NOTE_TAG = "mlflow.note.content"  # the text that MLflow's pages call the description

# A config, an environment, tables and figures are small.
_MOST_ARTIFACT_BYTES = 256 << 20

# For artifacts only: an artifact store may fail permanently while metrics still work.
_MAX_ATTEMPTS = 5


@dataclass(kw_only=True)
class MlflowMirror:
    """Uploads one journal to the MLflow run of a run folder. Only one thread may use it.

    `upload` may raise any error of MLflow. When it is called again it continues.
    """

    run_dir: Path
    journal: Journal
    uri: str
    experiment: str
    run_name: str
    is_training: bool
    parent_run_id: str | None
    run_id: str = ""
    _connection: "MlflowClient | None" = None
    _uploaded: dict[str, int] = field(default_factory=dict)
    _attempts: Counter[int] = field(default_factory=Counter)
    """Of uploading an artifact, by the number of its line."""

    _offset: int = 0

    def upload(self) -> int:
        """Send the journal's lines that MLflow does not have yet, and return their number."""
        if self._connection is None:
            self._connect()
        sent = 0
        for lines, end in parts(self.journal.read, self._offset):
            for group in _grouped(self._unsent(lines)):
                self._send(group)
                sent += len(group)
            self._losses.read(lines)
            self._offset = end
            self._send_to_parent()
        return sent

    def disconnect(self) -> bool:
        """Drop the connection, and tell whether there was one. The next `upload` looks for the run
        again, as after a restart."""
        was_connected, self._connection = self._connection is not None, None
        return was_connected

    def num_unsent(self) -> int:
        """Number of lines of the journal that have not been sent, as far as this process knows."""
        further = parts(self.journal.read, self._offset)
        return sum(len(self._unsent(lines)) for lines, _ in further)

    @property
    def _client(self) -> "MlflowClient":
        assert self._connection is not None
        return self._connection

    def _connect(self) -> None:
        """Find or create the run, and read from its tags which lines it already has."""
        lines, _ = self.journal.read()
        client, run = open_run(
            self.run_dir,
            uri=self.uri,
            experiment=self.experiment,
            run_name=self.run_name,
            start_ms=lines[0]["time_ms"] if lines else time.time_ns() // 1_000_000,
            is_training=self.is_training,
        )
        self.run_id = run.info.run_id
        self._uploaded = parsed_positions(run.data.tags.get(self._position_tag, ""))
        self._offset = 0
        self._losses = _Losses(self.run_name)
        self._connection = client
        self.parent_run_id = checked_parent(client, self.parent_run_id, run.info.experiment_id)

    def _unsent(self, lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        return [line for line in lines if position(line) > self._uploaded.get(line["kind"], -1)]

    def _send(self, group: Sequence[dict[str, Any]]) -> None:
        """Send a group of lines from `_grouped`, and store the new position."""
        try:
            if _is_event(group[0]):
                self._send_event(group[0])
            else:
                self._send_metrics(group)
        except Exception as error:
            if not self._is_final(error, group[0]):
                raise
            if len(group) > 1:
                for line in group:
                    self._send([line])
                return
            # A line that MLflow will never accept must not block the lines after it.
            logger.warning(
                "MLflow refused line %s %d of %s, which is kept in that file only: %s",
                group[0]["kind"],
                position(group[0]),
                self.journal.path,
                short_error(error),
            )
            self._store_position(group)
        self._uploaded = self._positions(group)

    def _is_final(self, error: Exception, line: dict[str, Any]) -> bool:
        """Whether sending this line again is pointless. Raises if the run itself was deleted."""
        if not is_refusal(error):
            if line["kind"] != "artifact":
                return False
            self._attempts[line["number"]] += 1
            if self._attempts[line["number"]] < _MAX_ATTEMPTS:
                return False
        check_active(self._client.get_run(self.run_id))
        return True

    def _send_metrics(self, group: Sequence[dict[str, Any]]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(clean_name(name), float(value), line["time_ms"], line["step"])
            for line in group
            for name, value in line["values"].items()
        ]
        # The position is sent with the last batch, when all lines of the group have arrived.
        while len(metrics) > MAX_METRICS:
            self._client.log_batch(self.run_id, metrics[:MAX_METRICS])
            metrics = metrics[MAX_METRICS:]
        self._client.log_batch(self.run_id, metrics, tags=[self._position(group)])

    def _send_to_parent(self) -> None:
        """Log the run's losses to the parent run of its sweep.

        MLflow's pages fold the runs of a sweep below their parent, which has no metrics of its own.
        """
        if self.parent_run_id is None or not self._losses.unsent:
            return
        from mlflow.entities import Metric

        metrics = [Metric(*one) for one in self._losses.unsent]
        try:
            for first in range(0, len(metrics), MAX_METRICS):
                self._client.log_batch(self.parent_run_id, metrics[first : first + MAX_METRICS])
        except Exception as error:
            if not is_refusal(error):
                raise
            logger.warning("MLflow refused losses for the parent run: %s", short_error(error))
            self.parent_run_id = None
        self._losses.unsent.clear()

    def _send_event(self, line: dict[str, Any]) -> None:
        match line["kind"]:
            case "status":
                self._send_status(line)
            case "params":
                self._send_params(line["values"])
            case "tags":
                self._send_tags(line["values"])
            case "datasets":
                self._send_datasets(line["datasets"])
            case "artifact":
                self._send_artifact(line)
            case "checkpoint":
                self._send_checkpoint(line)
        self._store_position([line])

    def _send_status(self, line: dict[str, Any]) -> None:
        """Set the run's status, unless a later line changes it or MLflow already shows it.

        A server that hung may execute a request that timed out here after later requests, so no
        needless request is made.
        """
        newest = self.journal.last("status")
        if newest is not None and line["number"] < newest["number"]:
            return
        if line["status"] == "RUNNING":
            if self._client.get_run(self.run_id).info.status != "RUNNING":
                self._client.update_run(self.run_id, "RUNNING")
        else:
            self._client.set_terminated(self.run_id, line["status"], end_time=line["time_ms"])

    def _send_params(self, values: Mapping[str, str]) -> None:
        """Log new params. Changed ones become tags, because MLflow params cannot change."""
        from mlflow.entities import Param

        data = self._client.get_run(self.run_id).data
        current = {clean_name(k): truncate(v, MAX_PARAM_CHARACTERS) for k, v in values.items()}
        new = [Param(name, value) for name, value in current.items() if name not in data.params]
        self._client.log_batch(self.run_id, params=new)
        changed = {}
        for name, value in current.items():
            tag = f"{CHANGED_TAG}{name}"[:MAX_NAME_CHARACTERS]
            if value != data.tags.get(tag, data.params.get(name, value)):
                changed[tag] = value
        self._set_tags(changed)

    def _send_tags(self, values: Mapping[str, str]) -> None:
        """Set tags, but no other parent, and no description that may have been edited in MLflow."""
        tags = dict(values)
        if NOTE_TAG in self._client.get_run(self.run_id).data.tags:
            tags.pop(NOTE_TAG, None)
        if tags.get(PARENT_TAG) != self.parent_run_id:
            tags.pop(PARENT_TAG, None)
        self._set_tags(tags)

    def _send_datasets(self, datasets: Iterable[Mapping[str, str]]) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        inputs = [
            DatasetInput(
                Dataset(
                    *(one["name"], one["digest"], one["source_type"], one["source"]),
                    profile=one["profile"],
                ),
                [InputTag("mlflow.data.context", one["context"])],
            )
            for one in datasets
        ]
        self._client.log_inputs(self.run_id, inputs)

    def _set_tags(self, values: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        tags = [RunTag(clean_name(k), truncate(v, MAX_TAG_CHARACTERS)) for k, v in values.items()]
        self._client.log_batch(self.run_id, tags=tags)

    def _send_artifact(self, line: dict[str, Any]) -> None:
        """Upload a file, or the files of a folder, that lie below the run folder."""
        try:
            path = inner_path(self.run_dir, line["path"])
        except ValueError as error:
            logger.warning("%s, so it cannot be uploaded to MLflow", error)
            return
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_symlink() or not file.is_file():  # a link may lead anywhere
                continue
            below = file.parent.relative_to(path).as_posix() if path.is_dir() else "."
            parts = [part for part in (line["folder"] or "", below) if part not in ("", ".")]
            if not self._may_store("/".join([*parts, file.name])):
                return
            with TemporaryDirectory() as temporary:
                # MLflow would open whatever takes the file's place, and wait for ever at a FIFO.
                copy = Path(temporary, file.name)
                try:
                    copy_regular(file, copy, _MOST_ARTIFACT_BYTES)
                except ValueError as error:
                    logger.warning("%s; it is not uploaded to MLflow", error)
                    continue
                self._client.log_artifact(self.run_id, str(copy), "/".join(parts) or None)

    def _may_store(self, artifact: str) -> bool:
        """Whether a database that the user has not named stores an artifact beside itself.

        The database says where the artifacts of a run are, and may be someone else's.
        """
        if not self.uri.startswith(SQLITE) or is_named(self.uri):
            return True
        store = Path(self.uri.removeprefix(SQLITE)).parent.resolve()
        location = self._client.get_run(self.run_id).info.artifact_uri
        destination = Path(local_path(location), artifact).resolve()
        if not is_remote(location) and destination.is_relative_to(store / "mlruns"):
            return True
        logger.warning(
            "%s is not uploaded to %s, which you have not named before and which stores it outside "
            "%s",
            *(artifact, self.uri, store / "mlruns"),
        )
        return False

    def _send_checkpoint(self, line: dict[str, Any]) -> None:
        """Log a checkpoint's measurements; the newest one of a training becomes a tag."""
        if self.is_training:
            self._set_tags({CHECKPOINT_TAG: line["path"]})
        if line["values"]:
            self._send_metrics([line])

    @property
    def _position_tag(self) -> str:
        return f"{UPLOADED_TAG}{self.journal.path.stem}"

    def _positions(self, group: Sequence[dict[str, Any]]) -> dict[str, int]:
        """The last position of each kind of line when this group has been sent too."""
        return self._uploaded | {line["kind"]: position(line) for line in group}

    def _position(self, group: Sequence[dict[str, Any]]) -> Any:
        from mlflow.entities import RunTag

        return RunTag(self._position_tag, json.dumps(self._positions(group)))

    def _store_position(self, group: Sequence[dict[str, Any]]) -> None:
        self._client.log_batch(self.run_id, tags=[self._position(group)])


class _Losses:
    """The best and last loss of a journal, as metrics of the parent run: `best/RUN`, `last/RUN`.

    They are validation losses, or where a run ends without one, training losses. Read again from
    the journal's start, the same lines give the same metrics, of which MLflow stores one.
    """

    def __init__(self, run_name: str) -> None:
        self.unsent: list[tuple[str, float, int, int]] = []  # name, value, milliseconds, step
        self._run_name = clean_name(run_name)
        self._best = {"train": math.inf, "validation": math.inf}
        self._last: dict[str, tuple[float, int, int]] = {}  # loss, milliseconds, step

    def read(self, lines: Iterable[dict[str, Any]]) -> None:
        """Take these lines of the journal into account."""
        for line in lines:
            kind = line["kind"]
            if (
                kind in self._best
                and (loss := line["values"].get(f"curves/{kind}_loss")) is not None
            ):
                self._last[kind] = (float(loss), line["time_ms"], line["step"])
                self._best[kind] = min(self._best[kind], float(loss))  # in this order without NaN
                if kind == "validation":
                    self._add(kind)
            elif kind == "status" and line["status"] != "RUNNING" and set(self._last) == {"train"}:
                self._add("train")

    def _add(self, kind: str) -> None:
        loss, time_ms, step = self._last[kind]
        for name, value in (("best", self._best[kind]), ("last", loss)):
            metric = f"{name}/{self._run_name}"[:MAX_NAME_CHARACTERS]
            self.unsent.append((metric, value, time_ms, step))


def _is_event(line: Mapping[str, Any]) -> bool:
    return "number" in line


def _grouped(lines: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Group consecutive lines of metrics up to a full batch; each event is a group of its own."""
    group: list[dict[str, Any]] = []
    size = 0
    for line in lines:
        added = len(line.get("values", ()))
        if group and (_is_event(line) or size + added > MAX_METRICS):
            yield group
            group, size = [], 0
        if _is_event(line):
            yield [line]
        else:
            group.append(line)
            size += added
    if group:
        yield group
