"""What two ranks do about a shard cut under them, a full disk, and a server that is away."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from longhaul.pipeline.tracking.mlflow_run import ENVIRONMENT

Run = Any  # conftest.RunFolder: modules of this folder cannot import each other

TWO_RANKS = ["trainer.strategy=fsdp", "trainer.devices=2", "trainer.micro_batch=2"]


def losses(run: Run) -> dict[int, float]:
    lines = (run.path / "small" / "logs" / "metrics.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    return {e["step"]: e["values"]["curves/train_loss"] for e in entries if e["kind"] == "train"}


@pytest.mark.wide
@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.soak), 1])
def test_a_shard_that_is_cut_while_it_is_read_is_named_and_the_run_goes_on_when_mended(
    run: Run, make_run: Any, corpus: Path, workers: int
) -> None:
    copy = run.path / "copy"
    shutil.copytree(corpus, copy)
    # The rate of the papers: at five times that, the order of sums alone moves losses by 1e-3.
    rate = "optim.learning_rate=6e-4"
    options = [*TWO_RANKS, rate, f"data.manifest={copy}/train", f"data.workers={workers}"]
    process = run.start("train", "small.yaml", *options)
    run.wait_for_step(process, 12)
    for shard in (copy / "train").glob("*.tar"):
        os.truncate(shard, 512)
    status, error = process.end()
    assert status in (1, 2), error
    assert "bytes, wanted" in error
    assert ".tar: 512 bytes" in error
    assert "Bus error" not in error
    for shard in (corpus / "train").glob("*.tar"):
        shutil.copy(shard, copy / "train" / shard.name)
    run.longhaul("train", "small.yaml", *options)
    undisturbed = make_run()
    undisturbed.longhaul("train", "small.yaml", rate)
    # Other samples would change them by hundredths.
    assert losses(run) == pytest.approx(losses(undisturbed), abs=1e-3)


@pytest.mark.wide
def test_a_full_disk_stops_all_ranks_and_loses_nothing(run: Run) -> None:
    # A limit on the size of a file is a disk that a checkpoint does not fit on, and all else does.
    options = ["small.yaml", *TWO_RANKS, "model.width=256", "trainer.max_tokens=6144"]
    started = run.start("train", *options, largest_file=1 << 20)
    status, error = started.end()
    assert status == 1
    (line,) = [line for line in error.splitlines() if line.startswith("longhaul:")]
    assert "checkpoint of step 4 could not be saved" in line
    assert "File too large" in line
    assert not list((run.path / "small" / "checkpoints").iterdir())
    run.longhaul("train", *options)
    assert (run.path / "small" / "checkpoints" / "step-000000012").is_dir()


@pytest.mark.soak
def test_a_server_away_for_a_minute_delays_nobody_and_gets_every_step(
    make_run: Any, tmp_path: Path
) -> None:
    num_updates = 2000
    run = make_run(num_updates)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def serve() -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "mlflow", "server", "--workers", "1"),
                *("--host", "127.0.0.1", "--port", str(port)),
                *("--backend-store-uri", "sqlite:///server.db"),
                *("--artifacts-destination", "./artifacts"),
            ],
            cwd=tmp_path,
            env={**os.environ, **ENVIRONMENT},
            start_new_session=True,
        )

    server = serve()
    options = [*TWO_RANKS, f"tracking.uri=http://127.0.0.1:{port}", "checkpoint.every_tokens=51200"]
    process = run.start("train", "small.yaml", *options)
    log = run.path / "small" / "logs" / "train.log"
    run.wait_for_step(process, 50)
    os.killpg(server.pid, signal.SIGKILL)
    server.wait()
    before = run.last_step
    time.sleep(60)
    assert run.last_step > before + 100, "training waited"
    server = serve()
    status, error = process.end(seconds=600)
    os.killpg(server.pid, signal.SIGKILL)
    server.wait()
    assert status == 0, error
    assert "does not take metrics" in log.read_text()
    assert json.loads((run.path / "small" / "DONE").read_text())["is_tracked"]
    client = MlflowClient(f"sqlite:///{tmp_path}/server.db")
    run_id = (run.path / "small" / "mlflow_run_id").read_text().strip()
    assert client.get_run(run_id).info.status == "FINISHED"
    history = client.get_metric_history(run_id, "curves/train_loss")
    assert sorted(point.step for point in history) == list(range(1, num_updates + 1))
