"""Copies a run's journal into one MLflow run, each line once.

Found by trying mlflow 3.17.2, on sqlite and through `mlflow server`, and relied on here:

- Sending a metric again with the same (key, value, timestamp, step) adds no row, NaN included, also
  when its batch holds new ones. So what counts is that a line is sent at least once, from a journal
  that never changes; how far the copying has got may be remembered a little late.
- `log_batch` writes params, metrics and tags in that order, each in a transaction of its own. Tags
  sent with metrics are never ahead of them, so the position travels there.
- A changed param is refused, and with it every param of the batch. A finished run takes more lines,
  a deleted one does not. Values above 6,000 (params) and 8,000 (tags) characters are cut.
- `log_outputs` refuses a link that exists, and two logged models may have one name.
- A thousand rows cost 0.07 to 0.2 s of this process on sqlite, 0.02 s of it through a server.
"""

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longhaul.pipeline.tracking.metrics_journal import position, read_lines
from longhaul.pipeline.tracking.mlflow_limits import (
    MAX_NAME_CHARACTERS,
    MAX_PARAM_CHARACTERS,
    MAX_TAG_CHARACTERS,
    clean_name,
    cut,
    is_refusal,
    one_line,
)
from longhaul.pipeline.tracking.mlflow_run import check_active, noted_run_id, open_run

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

logger = logging.getLogger(__name__)

# Metrics and tags of one request, 1,000 together and 100 tags at most. Of more, the client makes
# several requests and sends the tags with the first: the position would be ahead of the metrics.
MAX_METRICS = 900
CHECKPOINT_TAG = "longhaul.checkpoint"
CHANGED_TAG = "config_changed."
UPLOADED_TAG = "longhaul.uploaded."

# An artifact store may fail in ways of its own, for ever, while the rest works.
_MAX_ATTEMPTS = 5


class MlflowMirror:
    """One MLflow run for one run folder, fed from one journal. Used by a single thread.

    `copy` may raise whatever MLflow raises; called again later it continues.
    """

    def __init__(
        self, run_dir: Path, journal: Path, *, uri: str, experiment: str, run_name: str
    ) -> None:
        self.run_dir = run_dir
        self.journal = journal
        self.uri = uri
        self.experiment = experiment
        self.run_name = run_name
        self.run_id = ""
        self._connection: MlflowClient | None = None
        self._experiment_id = ""
        self._uploaded: dict[str, int] = {}
        self._attempts: dict[tuple[str, int], int] = {}
        self._offset = 0
        self._last_status = -1  # position of the newest status line among those being sent

    def copy(self) -> int:
        """Send the journal's lines that MLflow does not have yet; how many that were."""
        if self._connection is None:
            self._connect()
        sent = 0
        while True:
            lines, end = read_lines(self.journal, self._offset)
            if end == self._offset:
                return sent
            self._last_status = max(
                (position(line) for line in lines if line["kind"] == "status"), default=-1
            )
            for group in _grouped(self._fresh(lines)):
                self._send(group)
                for line in group:
                    self._uploaded[line["kind"]] = position(line)
                sent += len(group)
            self._offset = end

    def known_run_id(self) -> str | None:
        """The id of the MLflow run, None before there is one."""
        return self.run_id or noted_run_id(self.run_dir)

    def disconnect(self) -> None:
        """Forget the connection: the next `copy` looks for the run again, as after a restart."""
        self._connection = None

    def waiting(self) -> int:
        """How many lines have not been sent, as far as is known here."""
        count, offset = 0, self._offset
        while True:
            lines, end = read_lines(self.journal, offset)
            if end == offset:
                return count
            count += len(self._fresh(lines))
            offset = end

    @property
    def _client(self) -> "MlflowClient":
        assert self._connection is not None
        return self._connection

    def _connect(self) -> None:
        """Find the run, or create it, and learn from its tags how far the copying has got."""
        lines, _ = read_lines(self.journal)
        client, run = open_run(
            self.run_dir,
            uri=self.uri,
            experiment=self.experiment,
            run_name=self.run_name,
            start_ms=lines[0]["time_ms"] if lines else time.time_ns() // 1_000_000,
        )
        self.run_id = run.info.run_id
        self._experiment_id = run.info.experiment_id
        prefix = self._position_tag("")
        self._uploaded = {
            name.removeprefix(prefix): int(value)
            for name, value in run.data.tags.items()
            if name.startswith(prefix)
        }
        self._offset = 0
        self._connection = client

    def _fresh(self, lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        return [line for line in lines if position(line) > self._uploaded.get(line["kind"], -1)]

    def _send(self, group: Sequence[dict[str, Any]]) -> None:
        """Send lines that `_grouped` put together, and note that they are there."""
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
            # One line that MLflow will never take must not hold up those behind it.
            logger.warning(
                "MLflow refused line %s %d of %s, which stays in that file: %s",
                group[0]["kind"],
                position(group[0]),
                self.journal,
                one_line(error),
            )
            self._mark(group)

    def _is_final(self, error: Exception, line: dict[str, Any]) -> bool:
        """Whether sending this line again is pointless; raises if it is the run that is gone."""
        if not is_refusal(error):
            if line["kind"] not in ("artifact", "checkpoint"):
                return False
            key = (line["kind"], position(line))
            self._attempts[key] = self._attempts.get(key, 0) + 1
            if self._attempts[key] < _MAX_ATTEMPTS:
                return False
        check_active(self._client.get_run(self.run_id))
        return True

    def _send_metrics(self, group: Sequence[dict[str, Any]], model_id: str | None = None) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(clean_name(name), float(value), line["time_ms"], line["step"], model_id=model_id)
            for line in group
            for name, value in line["values"].items()
        ]
        # The position belongs to the last part: before it, the lines are not all there.
        while len(metrics) > MAX_METRICS:
            self._client.log_batch(self.run_id, metrics[:MAX_METRICS])
            metrics = metrics[MAX_METRICS:]
        self._client.log_batch(self.run_id, metrics, tags=self._positions(group))

    def _send_event(self, line: dict[str, Any]) -> None:
        match line["kind"]:
            case "status":
                self._send_status(line)
            case "params":
                self._send_params(line["values"])
            case "tags":
                self._set_tags(line["values"])
            case "artifact":
                self._send_artifact(line)
            case "checkpoint":
                self._send_checkpoint(line)
        self._mark([line])

    def _send_status(self, line: dict[str, Any]) -> None:
        """Tell how the run is, if it is not known and still true.

        A server that hung may carry out a request that was given up here after later ones, so none
        is made that is not needed.
        """
        if position(line) < self._last_status:
            return
        if line["status"] == "RUNNING":
            if self._client.get_run(self.run_id).info.status != "RUNNING":
                self._client.update_run(self.run_id, "RUNNING")
        else:
            self._client.set_terminated(self.run_id, line["status"], end_time=line["time_ms"])

    def _send_params(self, values: Mapping[str, str]) -> None:
        """Log params that are new; those that changed become tags, which may change."""
        from mlflow.entities import Param

        data = self._client.get_run(self.run_id).data
        wanted = {clean_name(k): cut(v, MAX_PARAM_CHARACTERS) for k, v in values.items()}
        fresh = [Param(name, value) for name, value in wanted.items() if name not in data.params]
        self._client.log_batch(self.run_id, params=fresh)
        changed = {}
        for name, value in wanted.items():
            tag = f"{CHANGED_TAG}{name}"[:MAX_NAME_CHARACTERS]
            if value != data.tags.get(tag, data.params.get(name, value)):
                changed[tag] = value
        self._set_tags(changed)

    def _set_tags(self, values: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        tags = [RunTag(clean_name(k), cut(v, MAX_TAG_CHARACTERS)) for k, v in values.items()]
        self._client.log_batch(self.run_id, tags=tags)

    def _send_artifact(self, line: dict[str, Any]) -> None:
        path = self.run_dir / line["path"]
        if not path.exists():
            logger.warning("%s is gone and cannot be copied to MLflow", path)
        elif path.is_dir():
            self._client.log_artifacts(self.run_id, str(path), line["folder"] or None)
        else:
            self._client.log_artifact(self.run_id, str(path), line["folder"] or None)

    def _send_checkpoint(self, line: dict[str, Any]) -> None:
        """A logged model that names the folder; its weights stay where they are."""
        from mlflow.entities import LoggedModelOutput

        found = self._client.search_logged_models(
            [self._experiment_id],
            f"source_run_id = '{self.run_id}' AND tags.`{CHECKPOINT_TAG}` = '{line['path']}'",
            max_results=1,
        )
        if found:
            model_id = found[0].model_id
        else:
            created = self._client.create_logged_model(
                self._experiment_id,
                name=Path(line["path"]).name,
                source_run_id=self.run_id,
                tags={CHECKPOINT_TAG: line["path"], "mlflow.model.isExternal": "true"},
                params={"path": str((self.run_dir / line["path"]).absolute())},
                model_type="checkpoint",
            )
            model_id = created.model_id
        self._client.finalize_logged_model(model_id, "READY")
        outputs = self._client.get_run(self.run_id).outputs
        if model_id not in [
            output.model_id for output in (outputs.model_outputs if outputs else [])
        ]:
            self._client.log_outputs(self.run_id, [LoggedModelOutput(model_id, line["step"])])
        if line["values"]:
            self._send_metrics([line], model_id)

    def _position_tag(self, kind: str) -> str:
        return f"{UPLOADED_TAG}{self.journal.stem}.{kind}"

    def _positions(self, group: Sequence[dict[str, Any]]) -> list[Any]:
        from mlflow.entities import RunTag

        last = {line["kind"]: position(line) for line in group}
        return [RunTag(self._position_tag(kind), str(value)) for kind, value in last.items()]

    def _mark(self, group: Sequence[dict[str, Any]]) -> None:
        self._client.log_batch(self.run_id, tags=self._positions(group))


def _is_event(line: Mapping[str, Any]) -> bool:
    return "number" in line


def _grouped(lines: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Neighbouring lines of metrics up to a full batch together, each event alone."""
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
