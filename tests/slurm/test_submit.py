"""Runs that `longhaul submit` queues on a real Slurm: how they end, stop, restart, and follow."""

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from mlflow.tracking import MlflowClient

from longhaul.pipeline.checkpoint import Saved, newest_checkpoint

CHECKOUT = Path(__file__).parent.parent.parent
LONGHAUL = [sys.executable, "-P", "-m", "longhaul.pipeline.cli"]
Cluster = Any  # conftest.Cluster: modules of tests cannot import each other

NUM_UPDATES = 40
# Two nodes of two tasks each.
CONFIG = """
name: small
root: runs
model:
  layers: 2
  width: 32
  heads: 2
  vocabulary: 320
  attention: {{kind: conformal_sympow}}
data:
  manifest: {corpus}
  context: 64
  workers: 0
optim:
  tokens_per_update: 512
trainer:
  max_tokens: {max_tokens}
  micro_batch: 2
  strategy: fsdp
  devices: 2
  nodes: 2
  stop_seconds: 20
checkpoint:
  every_tokens: 4096
tracking:
  uri: sqlite:///mlflow.db
  experiment: tests
slurm:
  cpus_per_task: 1
"""


@dataclass(frozen=True)
class Work:
    """A folder with small.yaml in it, and a cluster to submit to from there."""

    cluster: Cluster
    path: Path

    def submit(self, *arguments: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
        command = [*LONGHAUL, "submit", "small.yaml", *arguments]
        return self.cluster.run(*command, cwd=self.path, check=check)

    def jobs(self, folder: str = "small") -> list[str]:
        lines = (self.path / "runs" / folder / "slurm" / "jobs.jsonl").read_text().splitlines()
        return [json.loads(line)["job_id"] for line in lines]

    def run(self, *arguments: str) -> str:
        """Submit, and wait for the end; the job's id."""
        self.submit(*arguments)
        (job,) = self.jobs()
        self.cluster.wait(job, "COMPLETED", 120)
        return job

    @property
    def folder(self) -> Path:
        return self.path / "runs" / "small"

    @property
    def step(self) -> int:
        """The last update that the journal knows."""
        journal = self.folder / "logs" / "metrics.jsonl"
        lines = journal.read_text().splitlines() if journal.exists() else []
        return max((e["step"] for e in map(json.loads, lines) if e["kind"] == "train"), default=0)

    def wait_for_step(self, job: str, step: int) -> None:
        deadline = time.monotonic() + 120
        while self.step < step:
            assert time.monotonic() < deadline, self.said(job)
            assert self.cluster.job(job)["JobState"] in ("PENDING", "RUNNING", "COMPLETING")
            time.sleep(0.05)

    def said(self, job: str) -> str:
        logs = sorted(self.folder.glob(f"logs/job-{job}*.log"))
        return "\n".join(f"{log.name}:\n{log.read_text()[-3000:]}" for log in logs)

    def weights(self) -> dict[str, torch.Tensor]:
        newest = newest_checkpoint(self.folder / "checkpoints")
        assert newest is not None
        assert newest.name == f"step-{NUM_UPDATES:09d}"
        return Saved(newest, "model").read_group("model")

    def assert_one_clean_run(self) -> None:
        client = MlflowClient(f"sqlite:///{self.path}/mlflow.db")
        experiment = client.get_experiment_by_name("tests")
        assert experiment is not None
        (tracked,) = client.search_runs([experiment.experiment_id])
        assert tracked.info.status == "FINISHED"
        history = client.get_metric_history(tracked.info.run_id, "train/loss")
        assert sorted(point.step for point in history) == list(range(1, NUM_UPDATES + 1))


MakeWork = Callable[..., Work]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    command = [*LONGHAUL, "prepare", "text", str(CHECKOUT / "modules"), "shards"]
    sizes = ["--doc-tokens", "1024", "--docs-per-shard", "4"]
    subprocess.run([*command, *sizes], cwd=folder, check=True, capture_output=True)
    return folder / "shards"


@pytest.fixture(scope="module")
def make_work(
    make_cluster: Callable[..., Cluster], corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> MakeWork:
    def make(name: str = "work") -> Work:
        cluster = make_cluster()
        cluster.environment["OMP_NUM_THREADS"] = "1"
        path = tmp_path_factory.mktemp(name)
        text = CONFIG.format(corpus=shlex.quote(str(corpus)), max_tokens=512 * NUM_UPDATES)
        (path / "small.yaml").write_text(text)
        return Work(cluster, path)

    return make


@pytest.fixture(scope="module")
def undisturbed(make_work: MakeWork) -> Work:
    work = make_work()
    work.run()
    return work


@pytest.fixture
def work(make_work: MakeWork, cluster: Cluster) -> Work:
    return make_work()


def assert_same_end(work: Work, undisturbed: Work) -> None:
    found, wanted = work.weights(), undisturbed.weights()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    work.assert_one_clean_run()


def test_two_nodes_of_two_tasks_train_to_the_end(undisturbed: Work) -> None:
    undisturbed.weights()
    undisturbed.assert_one_clean_run()
    (job,) = undisturbed.jobs()
    folder = undisturbed.folder
    assert f"steps 0 to {NUM_UPDATES}" in (folder / "logs" / f"job-{job}.log").read_text()
    tasks = [folder / "logs" / f"job-{job}-task-{task}.log" for task in range(4)]
    assert all(task.exists() for task in tasks)
    for name in ("config.yaml", "train.sbatch", "packages.txt", f"job-{job}.env"):
        assert (folder / "slurm" / name).stat().st_size
    assert (folder / "environment.json").exists()


def test_signals_and_requeues_lead_to_the_same_weights(work: Work, undisturbed: Work) -> None:
    work.submit()
    (job,) = work.jobs()
    cluster = work.cluster

    def by_signal() -> None:
        cluster.run("scancel", "--signal=USR1", job)

    def by_administrator() -> None:
        cluster.run("scontrol", "requeue", job)

    ways = ((6, by_signal), (14, by_signal), (22, by_administrator))
    for restarts, (step, disturb) in enumerate(ways, start=1):
        work.wait_for_step(job, step)
        disturb()
        deadline = time.monotonic() + 90
        while int(cluster.job(job)["Restarts"]) < restarts:
            assert time.monotonic() < deadline, work.said(job)
            time.sleep(0.1)
    cluster.wait(job, "COMPLETED", 120)
    assert_same_end(work, undisturbed)


NASTY = "a b;c\"d'e$(touch pwned)`touch pwned`#f%j\\g&h|i*"


def test_no_name_breaks_or_runs_anything(make_work: MakeWork, cluster: Cluster) -> None:
    work = make_work(NASTY.replace("/", "_")[:20])
    small = [f"name={json.dumps(NASTY)}", "trainer.nodes=1", "trainer.devices=1"]
    work.submit(*small, "trainer.strategy=single", "slurm.account=x y", "trainer.max_tokens=1024")
    (job,) = work.jobs(NASTY)
    cluster.wait(job, "COMPLETED", 120)
    run = work.path / "runs" / NASTY
    assert json.loads((run / "DONE").read_text())["step"] == 2
    assert "steps 0 to 2" in (run / "logs" / f"job-{job}.log").read_text()
    assert "2/2" in (run / "logs" / f"job-{job}-task-0.log").read_text()
    assert cluster.job(job)["JobName"] == NASTY
    assert cluster.job(job)["Account"] == "x y"
    assert not list(work.path.rglob("pwned*"))
    assert {path.name for path in work.path.iterdir()} == {"small.yaml", "runs", "mlflow.db"}
