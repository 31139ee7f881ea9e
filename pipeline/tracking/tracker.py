"""Logs a run to MLflow without ever making training wait for MLflow.

Everything logged is first written to a metrics journal in the run folder. A thread uploads the
journal to MLflow, and retries while the server is unavailable. The next process that opens the run
folder uploads what is still missing when this one ends.
"""

import logging
import math
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from longhaul.pipeline.system.waiting import (
    FIRST_UPLOAD_S,
    MAX_BACKOFF_S,
    SLOW_UPLOAD_S,
    SYSTEM_METRICS_EVERY_S,
    UPLOAD_EVERY_S,
)
from longhaul.pipeline.tracking.metrics_journal import Dataset, Journal, plain_values, position
from longhaul.pipeline.tracking.mlflow_limits import is_lasting, short_error, without_secrets
from longhaul.pipeline.tracking.mlflow_mirror import PARENT_TAG, MlflowMirror
from longhaul.pipeline.tracking.mlflow_run import (
    ENVIRONMENT,
    absolute_uri,
    load_mlflow,
    stored_run_id,
)

logger = logging.getLogger(__name__)

Status = Literal["FINISHED", "FAILED", "KILLED"]


class Tracker:
    """The metrics journal of a run folder, and its upload to MLflow.

    No method fails because of MLflow, and none waits for it except `finish`, which has a timeout.
    Only one process at a time can have the tracker of a run folder.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        uri: str,
        experiment: str,
        run_name: str,
        params: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
        datasets: Sequence[Dataset] = (),
        artifacts: Sequence[Path] = (),
        is_training: bool = True,
    ) -> None:
        """Open the run's journal.

        Args:
            run_dir: the run folder, in which the id of its MLflow run is stored.
            uri: `sqlite:///FILE`, or the address of a server.
            experiment, run_name: used if MLflow does not have the run yet.
            params: the whole config, flat. One that differs from MLflow's becomes a tag.
            tags: a new value replaces the old one, except for the run's description.
            datasets: what the run reads.
            artifacts: files of the run folder to upload, such as the config.
            is_training: True writes `logs/metrics.jsonl`, sets the run's status to RUNNING, and
                logs system metrics. False is for evaluations: it writes `logs/evaluation.jsonl` and
                leaves the status alone, so the run may be in training or finished.

        Raises:
            ValueError: MLflow does not support this sort of URI.
            JournalError: the journal cannot be written, or another process is writing it.
        """
        self._run_dir = run_dir.absolute()
        uri = absolute_uri(uri)
        name = "metrics" if is_training else "evaluation"
        self._journal = Journal(self._run_dir / "logs" / f"{name}.jsonl")
        self._mirror = MlflowMirror(
            run_dir=self._run_dir,
            journal=self._journal,
            uri=uri,
            experiment=experiment,
            run_name=run_name,
            is_training=is_training,
            parent_run_id=(tags or {}).get(PARENT_TAG),
        )
        self._params = dict(params or {})
        self._tags = dict(tags or {})
        self._datasets = [asdict(dataset) for dataset in datasets]
        self._artifacts = tuple(artifacts)
        self._is_training = is_training
        self._monitors: list[Any] = []
        self._next_system_metrics = 0.0
        self._failure: str | None = None
        self._may_upload = threading.Event()
        self._stop = threading.Event()
        self._deadline = math.inf
        self._thread = threading.Thread(target=self._upload_repeatedly, name="mlflow", daemon=True)

    def start(self) -> None:
        """Record that the run is running, and start the upload thread."""
        # Not in the thread, because other threads may be reading the environment in C code.
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        if self._is_training:
            self._add_if_new("status", "status", "RUNNING")
        self._add_if_new("params", "values", self._params)
        self._add_if_new("tags", "values", self._tags)
        self._add_if_new("datasets", "datasets", self._datasets)
        for path in self._artifacts:
            self.log_artifact(path)
        self._thread.start()

    @property
    def run_id(self) -> str | None:
        """The MLflow run's id, None if MLflow has never been reached, as far as can be read."""
        try:
            return self._mirror.run_id or stored_run_id(self._run_dir)
        except (OSError, ValueError):  # the upload tells of it
            return None

    def log(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Record a step's values. A step that the kind has from before a restart is ignored.

        Args:
            kind: of journal line, such as "train" or "validation". Each kind has its own steps.
            step: number of optimizer updates so far.
            values: metrics by the full name that MLflow shows, such as "curves/train_loss".
        """
        self._journal.append(kind, step, values)
        self._may_upload.set()

    def sync(self) -> None:
        """Flush what was logged to disk. Called before a checkpoint of the same step is saved."""
        self._journal.sync()

    def log_artifact(self, path: Path, folder: str = "") -> None:
        """Upload a file or folder to MLflow, with the contents that it has at the time of upload.

        Args:
            path: inside the run folder.
            folder: destination among the run's artifacts; empty for the top level.
        """
        self._journal.add("artifact", path=self._relative(path), folder=folder)

    def log_checkpoint(
        self, path: Path, step: int, values: Mapping[str, float] | None = None
    ) -> None:
        """Show a checkpoint of a training in MLflow as a tag, without uploading its files.

        Args:
            path: the checkpoint folder.
            step: its step.
            values: metrics of its evaluation, shown at its step.
        """
        self._journal.add(
            "checkpoint", step=step, path=self._relative(path), values=plain_values(values or {})
        )

    def finish(self, status: Status | None, timeout_s: float) -> bool:
        """Record how the run ended, upload the rest, and stop.

        Args:
            status: None leaves the status as it is.
            timeout_s: how long to wait for MLflow. For a finished run, one that is only slow gets
                `SLOW_UPLOAD_S` more; a run that stops may have no time left. What is not uploaded
                stays in the journal.

        Returns:
            Whether everything was uploaded.
        """
        if status is not None:
            self._journal.add("status", status=status)
        self._deadline = time.monotonic() + timeout_s
        self._stop.set()
        self._may_upload.set()
        if self._thread.ident is None:  # never started, so what MLflow has is unknown
            self._journal.close()
            return False
        self._thread.join(timeout_s)
        if status == "FINISHED" and self._failure is None:
            self._thread.join(SLOW_UPLOAD_S)  # on a busy machine the import alone can take long
        num_unsent = self._mirror.num_unsent()
        self._journal.close()
        if num_unsent:
            logger.warning(
                "%d lines of %s are not in MLflow at %s (%s); once it takes them again, %s",
                num_unsent,
                self._journal.path,
                without_secrets(self._mirror.uri),
                self._failure or "there was not enough time",
                "the same command sends them"
                if self._is_training
                else "the next evaluation of this run sends them",
            )
        return num_unsent == 0

    def _add_if_new(self, kind: str, field: str, value: Any) -> None:
        """Record an event, unless there is nothing to say or the last one said it."""
        last = self._journal.last(kind)
        if value and (last is None or last[field] != value):
            self._journal.add(kind, **{field: value})

    def _relative(self, path: Path) -> str:
        return str(path.absolute().relative_to(self._run_dir))

    def _upload_repeatedly(self) -> None:
        """The thread: upload and wait in turn, with longer waits while MLflow is unavailable.

        The first recorded value of a training comes before the first upload, unless it takes long.
        """
        if self._is_training:
            self._may_upload.wait(FIRST_UPLOAD_S)
        backoff = 0.0
        while True:
            # Read before the upload, so that the last upload includes all that was logged before
            # the stop.
            is_last = self._stop.is_set()
            try:
                load_mlflow(self._mirror.uri)
                # A crash of the machine must not lose a line that MLflow has: the resumed run would
                # write that step again, with another time, and MLflow would have it twice.
                self._journal.sync()
                num_sent = self._mirror.upload()
            except Exception as error:
                is_in_vain = not self._mirror.disconnect() and is_lasting(error)
                backoff = min(MAX_BACKOFF_S, max(1.0, 2 * backoff))
                if self._failure is None:
                    logger.warning(
                        "MLflow at %s does not take metrics; they are kept in %s until it does: %s",
                        *(without_secrets(self._mirror.uri), self._journal.path),
                        short_error(error),
                    )
                self._failure = short_error(error)
                if is_last and is_in_vain:
                    return
            else:
                if self._failure is not None:
                    logger.warning("MLflow is back; %d lines sent", num_sent)
                self._failure = None
                backoff = 0.0
                if is_last:
                    return
            if is_last:
                pause = min(1.0, backoff, self._deadline - time.monotonic())
                if pause <= 0:
                    return
                time.sleep(pause)
            else:
                self._log_system_metrics()
                self._stop.wait(max(UPLOAD_EVERY_S, backoff))

    def _log_system_metrics(self) -> None:
        """Log the machine's load, with the collectors of MLflow's own system monitor.

        That monitor itself sends directly to the server, ends at the first failure, and loses what
        it had measured. Through the journal, system metrics are as safe as the other metrics.
        """
        if not self._is_training or time.monotonic() < self._next_system_metrics:
            return
        self._next_system_metrics = time.monotonic() + SYSTEM_METRICS_EVERY_S
        try:
            if not self._monitors:
                self._monitors = _system_monitors()
            values: dict[str, float] = {}
            for monitor in self._monitors:
                monitor.collect_metrics()
                values.update(monitor.aggregate_metrics())
                monitor.clear_metrics()
            last = self._journal.last("system")
            step = 0 if last is None else position(last) + 1
            self._journal.append("system", step, {f"system/{k}": v for k, v in values.items()})
        except Exception as error:
            self._next_system_metrics = math.inf
            logger.warning("system metrics are off: %s", short_error(error))


def _system_monitors() -> list[Any]:
    """MLflow's monitors of CPU, disk, network, and of NVIDIA or AMD GPUs if there are any."""
    # Imported here because MLflow is slow to import (see load_mlflow).
    from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
    from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
    from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
    from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor
    from mlflow.system_metrics.metrics.rocm_monitor import ROCMMonitor

    always: tuple[Any, ...] = (CPUMonitor, DiskMonitor, NetworkMonitor)
    monitors = [monitor() for monitor in always]
    for device in (GPUMonitor, ROCMMonitor):
        try:
            monitors.append(device())
        except Exception as error:
            logger.debug("%s: %s", device.__name__, error)
    return monitors
