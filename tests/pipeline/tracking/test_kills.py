"""Trackers killed at any moment."""

import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from longhaul.pipeline.tracking.metrics_journal import read_lines

# A training process logs steps 1, 2, ..., repeats a few after each restart, and kills itself at the
# moments that matter. All are forked from one that has imported MLflow, which takes longest.
TRAINING = """
import os, signal, sys, threading, time
from pathlib import Path
from longhaul.pipeline.tracking import mlflow_run, tracker
from longhaul.pipeline.tracking.tracker import Tracker
import alembic.command
from mlflow.tracking import MlflowClient
import mlflow.store.tracking.sqlalchemy_store

run_dir, uri, *deaths = Path(sys.argv[1]), *sys.argv[2:]
tracker.UPLOAD_EVERY_S = 0.05

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

def prepare(death):
    if death == "store half made":
        real_upgrade = alembic.command.upgrade
        def upgrade(*args, **kwargs):
            threading.Timer(0.3, die).start()
            real_upgrade(*args, **kwargs)
            die()
        alembic.command.upgrade = upgrade
    elif death == "store made, not linked":
        os.link = die
    elif death == "run created, id not noted":
        real = mlflow_run.write_atomically
        mlflow_run.write_atomically = lambda path, text: (
            die() if path.name == "mlflow_run_id" else real(path, text)
        )
    elif death == "metrics sent, position not":
        real_batch = MlflowClient.log_batch
        def log_batch(self, run_id, metrics=(), params=(), tags=(), **rest):
            real_batch(self, run_id, metrics, params, () if metrics else tags, **rest)
            if metrics:
                die()
        MlflowClient.log_batch = log_batch
    elif death:
        threading.Timer(float(death), die).start()

def train(death):
    prepare(death)
    noted = run_dir / "step"
    first = int(noted.read_text()) + 1 if noted.exists() else 1
    tracker = Tracker(run_dir, uri=uri, experiment="killed", run_name="x", params={"a": "1"})
    tracker.start()
    for step in range(first, (10_000 if death else first + 100)):
        tracker.log("train", step, {"loss": 1 / step, "nan": float("nan")})
        if step % 10 == 0:
            tracker.log("validation", step, {"validation": float(step)})
            tracker.sync()
            fresh = run_dir / "step.new"
            fresh.write_text(str(step))
            fresh.replace(noted)
        time.sleep(0.005 if death else 0)
    os._exit(0 if tracker.finish("FINISHED", timeout_s=60) else 1)

for death in [*deaths, ""]:
    pid = os.fork()
    if pid == 0:
        train(death)
    print(death, os.waitpid(pid, 0)[1], sep=": ")
"""

DEATHS = [
    "store half made",
    "store made, not linked",
    "run created, id not noted",
    "metrics sent, position not",
]


def _history(client: Any, run_dir: Path, name: str) -> list[tuple[int, float]]:
    run_id = (run_dir / "mlflow_run_id").read_text().strip()
    return [(m.step, m.value) for m in client.get_metric_history(run_id, name)]


@pytest.mark.wide
def test_killed_at_any_moment_every_step_is_in_mlflow_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)  # else a journal that a kill left is refused
    moments = [f"{random.uniform(0.3, 1.0):.3f}" for _ in range(3)]
    deaths = [*DEATHS, *moments]
    result = subprocess.run(
        [sys.executable, "-c", TRAINING, str(run_dir), uri, *deaths],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    expected_ends = [f"{death}: {int(signal.SIGKILL)}" for death in deaths] + [": 0"]
    assert result.stdout.splitlines() == expected_ends, result.stderr

    from mlflow.tracking import MlflowClient  # More than a second, and not needed before.

    client = MlflowClient(uri)
    journaled = read_lines(run_dir / "logs" / "metrics.jsonl")[0]
    steps = [line["step"] for line in journaled if line["kind"] == "train"]
    assert steps == list(range(1, steps[-1] + 1))
    for name in ("loss", "nan"):
        found = _history(client, run_dir, name)
        assert Counter(step for step, _ in found) == Counter(steps), name
    assert dict(_history(client, run_dir, "loss")) == {step: 1 / step for step in steps}
    expected = [(step, float(step)) for step in steps if step % 10 == 0]
    assert _history(client, run_dir, "validation") == expected
    experiment = client.get_experiment_by_name("killed")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert not list(tmp_path.glob(".mlflow.db*"))
