"""The tracker against a real `mlflow server`, which is late, hangs, and is away at the end."""

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from longhaul.pipeline.tracking import tracker as tracker_module
from longhaul.pipeline.tracking.metrics_journal import read_lines
from longhaul.pipeline.tracking.mlflow_run import ENVIRONMENT
from longhaul.pipeline.tracking.tracker import Tracker


class _Server:
    """A server with processes of its own, in a process group that can be stopped as one."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self.folder = folder
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with (self.folder / "server.log").open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "mlflow", "server", "--workers", "1"),
                    *("--host", "127.0.0.1", "--port", str(self.port)),
                    *("--backend-store-uri", "sqlite:///server.db"),
                    *("--artifacts-destination", "./artifacts"),
                ],
                cwd=self.folder,
                env={**os.environ, **ENVIRONMENT},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        os.killpg(self.process.pid, number)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[_Server]:
    server = _Server(tmp_path)
    yield server
    if server.process is not None:
        server.signal(signal.SIGKILL)
        server.process.wait()


def _wait_for(what: str, condition: object, seconds: float = 90) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {seconds} s"
        time.sleep(0.05)


@pytest.mark.wide
def test_a_server_that_comes_and_goes_gets_every_step_once_and_delays_nobody(
    server: _Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(tracker_module, "UPLOAD_EVERY_S", 0.05)
    monkeypatch.setattr(tracker_module, "MAX_BACKOFF_S", 0.5)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    caplog.set_level(logging.WARNING)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text("name: x\n")

    def start() -> Tracker:
        tracker = Tracker(
            run_dir,
            uri=server.uri,
            experiment="tests",
            run_name="x",
            params={"lr": "0.1"},
            artifacts=[run_dir / "config.yaml"],
        )
        tracker.start()
        return tracker

    def warnings(text: str) -> int:
        return sum(text in message for message in caplog.messages)

    step = 0
    slowest = 0.0

    def log(count: int) -> None:
        nonlocal step, slowest
        for _ in range(count):
            step += 1
            began = time.monotonic()
            tracker.log("train", step, {"loss": 1 / step, "tokens": float(step)})
            slowest = max(slowest, time.monotonic() - began)
            time.sleep(0.002)

    tracker = start()
    log(100)
    _wait_for("warning about the missing server", lambda: warnings("does not take metrics") == 1)
    server.start()
    _wait_for("copy after the server came up", lambda: warnings("MLflow is back") == 1)
    log(100)
    server.signal(signal.SIGSTOP)
    log(600)
    _wait_for("warning about the hanging server", lambda: warnings("does not take metrics") == 2)
    log(100)
    server.signal(signal.SIGCONT)
    _wait_for("copy after the server went on", lambda: warnings("MLflow is back") == 2)
    log(100)
    server.signal(signal.SIGSTOP)
    log(50)
    began = time.monotonic()
    assert not tracker.finish("FINISHED", timeout_s=2)
    assert time.monotonic() - began < 5
    assert warnings("the same command sends them") == 1
    server.signal(signal.SIGCONT)
    # The request that was cut off may still be carried out while the lines are sent again.
    tracker = start()
    log(10)
    assert tracker.finish("FINISHED", timeout_s=60)
    assert slowest < 0.9  # waiting for a request to time out would take 1 s

    # The limit was for the tracker: a busy machine's server may take longer to read all this back.
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_TIMEOUT")

    from mlflow.tracking import MlflowClient  # More than a second, and not needed before.

    client = MlflowClient(server.uri)
    experiment = client.get_experiment_by_name("tests")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_id == (run_dir / "mlflow_run_id").read_text().strip()
    assert run.info.status == "FINISHED"
    assert run.data.params == {"lr": "0.1"}
    for name, value in (("loss", lambda step: 1 / step), ("tokens", float)):
        history = client.get_metric_history(run.info.run_id, name)
        assert Counter(m.step for m in history) == Counter(range(1, step + 1))
        assert all(m.value == value(m.step) for m in history)
    lines, _ = read_lines(run_dir / "logs" / "metrics.jsonl")
    assert [line["step"] for line in lines if line["kind"] == "train"] == list(range(1, step + 1))
    assert [a.path for a in client.list_artifacts(run.info.run_id)] == ["config.yaml"]
    assert list((tmp_path / "artifacts").rglob("config.yaml"))
