"""Shows a run in MLflow without ever making training wait for it.

What is logged goes into a journal in the run folder. A thread copies the journal into MLflow and
keeps trying while the server is away. What it has not copied when the process ends is copied by the
next process that opens the same run folder.
"""

import logging
import math
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from longhaul.pipeline.tracking.metrics_journal import Journal, plain_values, position
from longhaul.pipeline.tracking.mlflow_limits import one_line
from longhaul.pipeline.tracking.mlflow_mirror import MlflowMirror
from longhaul.pipeline.tracking.mlflow_run import ENVIRONMENT, absolute_uri, load_mlflow

logger = logging.getLogger(__name__)

Status = Literal["FINISHED", "FAILED", "KILLED"]

COPY_EVERY_S = 2.0
SYSTEM_EVERY_S = 10.0
MAX_BACKOFF_S = 30.0


class Tracker:
    """One run folder's MLflow run, with the journal that it is copied from.

    Nothing here waits for MLflow, except `finish`, which is told for how long; and nothing fails
    because of it. Only one process at a time can have a run folder's tracker.
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
        artifacts: Sequence[Path] = (),
        is_training: bool = True,
    ) -> None:
        """Open the run's journal.

        Args:
            run_dir: the run folder; its MLflow run's id is kept there.
            uri: `sqlite:///FILE`, or the address of a server.
            experiment, run_name: for a run that MLflow does not have yet.
            params: the whole config, flat. One that differs from what MLflow has, which cannot be
                changed there, becomes a tag `config_changed.NAME` with the value now in force.
            tags: commit, machine and the like. The latest value stays.
            artifacts: files of the run folder to copy, such as the config.
            is_training: write `logs/metrics.jsonl`, set the run's status to RUNNING, and log the
                machine's load. An evaluation says False: it has `logs/evaluation.jsonl` and leaves
                the status alone, so it can work on a run that is being trained or has ended.

        Raises:
            ValueError: the uri is of a kind that MLflow refuses.
            JournalError: the journal cannot be written, or another process is writing it.
        """
        self._run_dir = run_dir.absolute()
        uri = absolute_uri(uri)
        name = "metrics" if is_training else "evaluation"
        self._journal = Journal(self._run_dir / "logs" / f"{name}.jsonl")
        self._mirror = MlflowMirror(
            self._run_dir, self._journal.path, uri=uri, experiment=experiment, run_name=run_name
        )
        self._params = dict(params or {})
        self._tags = dict(tags or {})
        self._artifacts = tuple(artifacts)
        self._is_training = is_training
        self._monitors: list[Any] = []
        self._next_sample = 0.0
        self._stop = threading.Event()
        self._deadline = math.inf
        self._thread = threading.Thread(target=self._run, name="mlflow", daemon=True)

    def start(self) -> None:
        """Note in the journal that the run goes on, and begin to copy."""
        # Here and not in the thread: other threads may be reading the environment, in C.
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        last = self._journal.last("status")
        if self._is_training and (last is None or last["status"] != "RUNNING"):
            self._journal.add("status", status="RUNNING")
        for kind, values in (("params", self._params), ("tags", self._tags)):
            before = self._journal.last(kind)
            if values and (before is None or before["values"] != values):
                self._journal.add(kind, values=values)
        for path in self._artifacts:
            self.log_artifact(path)
        self._thread.start()

    @property
    def run_id(self) -> str | None:
        """The MLflow run's id, None while MLflow has not been reached for the first time."""
        return self._mirror.known_run_id()

    def log(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Record a step's values. A step that the kind had already, before a restart, is ignored.

        Args:
            kind: "train", "validation" and so on: steps are counted for each kind on its own.
            step: optimizer updates done.
            values: by the full name that MLflow shows, such as "train/loss".
        """
        self._journal.append(kind, step, values)

    def sync(self) -> None:
        """Put what was logged on disk, before a checkpoint of the same step gets its name."""
        self._journal.sync()

    def log_artifact(self, path: Path, folder: str = "") -> None:
        """Copy a file or folder to MLflow, as it is when its turn comes.

        Args:
            path: best inside the run folder, so that the folder may be moved.
            folder: where to put it among the run's artifacts. Empty is the top.
        """
        self._journal.add("artifact", path=self._relative(path), folder=folder)

    def log_checkpoint(
        self, path: Path, step: int, values: Mapping[str, float] | None = None
    ) -> None:
        """Show a checkpoint folder, which is not copied, as a model of the run.

        Args:
            path: the checkpoint folder.
            step: its step.
            values: what an evaluation of it measured, shown with the model and with the run.
        """
        self._journal.add(
            "checkpoint", step=step, path=self._relative(path), values=plain_values(values or {})
        )

    def finish(self, status: Status | None, timeout_s: float) -> bool:
        """Note how the run ended, copy what is left, and stop. Whether everything was copied.

        Args:
            status: None leaves the status as it is.
            timeout_s: how long to wait for MLflow. The rest stays in the journal.
        """
        if status is not None:
            self._journal.add("status", status=status)
        self._deadline = time.monotonic() + timeout_s
        self._stop.set()
        if self._thread.ident is None:  # never started: nobody knows what MLflow has
            self._journal.close()
            return False
        self._thread.join(timeout_s)
        self._journal.close()
        waiting = self._mirror.waiting()
        if waiting:
            logger.warning(
                "%d lines of %s are not in MLflow yet; they are sent when this run is next opened",
                waiting,
                self._journal.path,
            )
        return waiting == 0

    def _relative(self, path: Path) -> str:
        absolute = path.absolute()
        inside = absolute.is_relative_to(self._run_dir)
        return str(absolute.relative_to(self._run_dir) if inside else absolute)

    def _run(self) -> None:
        """The thread: copy, rest, copy; longer rests while MLflow is away."""
        backoff = 0.0
        away_since: float | None = None
        is_loaded = False
        while True:
            # Read first: what is logged before the stop is in the journal before the last copy.
            is_last = self._stop.is_set()
            try:
                if not is_loaded:
                    load_mlflow(self._mirror.uri)
                    is_loaded = True
                # A machine that crashes must not lose a line that MLflow has: the resumed run
                # would write that step again, with another time, and MLflow would have it twice.
                self._journal.sync()
                sent = self._mirror.copy()
            except Exception as error:
                self._mirror.disconnect()
                backoff = min(MAX_BACKOFF_S, max(1.0, 2 * backoff))
                if away_since is None:
                    away_since = time.monotonic()
                    logger.warning(
                        "MLflow at %s does not take metrics; they are kept in %s until it does: %s",
                        self._mirror.uri,
                        self._journal.path,
                        one_line(error),
                    )
            else:
                backoff = 0.0
                if away_since is not None:
                    gone = time.monotonic() - away_since
                    logger.warning("MLflow is back after %.0f s; %d lines sent", gone, sent)
                    away_since = None
                if is_last:
                    return
            if is_last:
                rest = min(1.0, backoff, self._deadline - time.monotonic())
                if rest <= 0:
                    return
                time.sleep(rest)
            else:
                self._sample(is_loaded)
                self._stop.wait(max(COPY_EVERY_S, backoff))

    def _sample(self, is_loaded: bool) -> None:
        """Log the machine's load, as MLflow's own monitor does.

        That monitor sends straight to the server, ends at the first failure, and loses what it had
        measured. Through the journal, system metrics survive what the others survive.
        """
        if not (is_loaded and self._is_training and time.monotonic() >= self._next_sample):
            return
        self._next_sample = time.monotonic() + SYSTEM_EVERY_S
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
            self._next_sample = math.inf
            logger.warning("system metrics are off: %s", one_line(error))


def _system_monitors() -> list[Any]:
    """MLflow's monitors of processor, disk, network, and of NVIDIA or AMD devices if any."""
    # MLflow is imported when somebody needs it (see load_mlflow).
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
