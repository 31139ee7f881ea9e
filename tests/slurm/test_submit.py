"""Runs that `longhaul submit` queues on a real Slurm: how they end, stop, restart, and follow."""

import json
import shlex
import shutil
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
  validation_manifest: {corpus}
  validation_samples: 4
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


ONE_TASK = ["trainer.nodes=1", "trainer.devices=1", "trainer.strategy=single"]

# Found by every Python of a job, and only there does it do something.
FAULT = """
import sys
if "train" in sys.orig_argv:
    import os, time
    from longhaul.modules.pretraining import Pretraining
    original = Pretraining.manual_backward
    def manual_backward(self, loss):
        if {when}:
            {what}
        original(self, loss)
    Pretraining.manual_backward = manual_backward
"""


@pytest.fixture
def fault(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, str], None]:
    """Makes the tasks of jobs do something before a backward pass when something is so."""

    def inject(when: str, what: str) -> None:
        (tmp_path / "sitecustomize.py").write_text(FAULT.format(when=when, what=what))
        before = cluster.environment.get("PYTHONPATH")
        path = str(tmp_path) if before is None else f"{tmp_path}:{before}"
        monkeypatch.setitem(cluster.environment, "PYTHONPATH", path)

    return inject


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


@pytest.mark.soak
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


NASTY = "a b;c\"d'e$(touch pwned)`touch pwned`#f&h|i*"


def test_no_name_breaks_or_runs_anything(make_work: MakeWork, cluster: Cluster) -> None:
    work = make_work("a $(touch pwned) 'b")
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
    assert {path.name for path in work.path.iterdir()} == {
        *("small.yaml", "runs", "mlflow.db", "mlruns")
    }


@pytest.mark.parametrize("name", ["a%jb", "a\\b"])
def test_names_that_slurm_would_replace_are_refused(work: Work, name: str) -> None:
    done = work.submit(f"name={json.dumps(name)}", check=False)
    assert done.returncode == 2
    assert "wanted a folder without % and" in done.stderr


def test_a_job_that_fails_at_once_is_not_queued_again(
    work: Work, fault: Callable[[str, str], None]
) -> None:
    fault("self.progress.step == 2", 'raise RuntimeError("no luck")')
    work.submit(*ONE_TASK)
    (job,) = work.jobs()
    ended = work.cluster.wait(job, "FAILED", 120)
    assert (ended["ExitCode"], ended["Restarts"]) == ("1:0", "0")
    assert "train ended with status 1 on node" in work.said(job)
    assert "longhaul: no luck" in work.said(job)


@pytest.mark.soak
def test_a_job_that_fails_later_each_time_is_queued_again_until_its_limit(
    work: Work, fault: Callable[[str, str], None]
) -> None:
    # Each start gets ten updates further, with a checkpoint on the way.
    fault(
        "self.progress.step == 10 * (1 + int(os.environ.get('SLURM_RESTART_COUNT', '0')))",
        'raise RuntimeError("no luck")',
    )
    work.submit(*ONE_TASK, "slurm.max_restarts=1")
    (job,) = work.jobs()
    ended = work.cluster.wait(job, "FAILED", 180)
    assert (ended["ExitCode"], ended["Restarts"]) == ("1:0", "1")
    assert "steps 0 to 8" in work.said(job)
    assert "steps 8 to 16" in work.said(job)


def test_bad_data_stops_a_chain_with_its_own_code(
    work: Work, corpus: Path, cluster: Cluster
) -> None:
    copy = work.path / "copy"
    shutil.copytree(corpus, copy)
    for shard in copy.glob("*.tar"):
        content = bytearray(shard.read_bytes())
        content[700] ^= 1
        shard.write_bytes(content)
    work.submit("--chain", "1", *ONE_TASK, "slurm.requeue=false", f"data.manifest={copy}")
    first, second = work.jobs()
    assert cluster.wait(first, "FAILED", 120)["ExitCode"] == "2:0"
    assert cluster.wait(second, "FAILED", 120)["ExitCode"] == "2:0"
    assert "sha256 is" in work.said(first)
    assert not (work.folder / "logs" / f"job-{second}-task-0.log").exists()


@pytest.mark.soak
def test_ranks_out_of_step_agree_on_a_signal(work: Work, fault: Callable[[str, str], None]) -> None:
    # One rank is asleep within the backward pass when the signal comes.
    fault("self.global_rank == 1 and self.progress.step == 5", "time.sleep(4)")
    work.submit("trainer.devices=1")
    (job,) = work.jobs()
    work.wait_for_step(job, 5)
    work.cluster.run("scancel", "--signal=USR1", job)
    while work.cluster.job(job)["Restarts"] == "0":
        assert work.cluster.job(job)["JobState"] in ("RUNNING", "COMPLETING", "PENDING")
        time.sleep(0.2)
    assert "stopped after step" in work.said(job)


@pytest.mark.soak
def test_a_chain_goes_on_and_ends_with_the_run(work: Work, cluster: Cluster) -> None:
    options = ["slurm.requeue=false", "slurm.then=[evaluate]", *ONE_TASK]
    done = work.submit("--chain", "2", *options)
    assert done.stdout.count("job ") == 4
    first, second, third, after = work.jobs()
    work.wait_for_step(first, 8)
    cluster.run("scancel", "--signal=USR1", first)
    assert cluster.wait(first, "FAILED", 60)["ExitCode"] == "75:0"
    cluster.wait(second, "COMPLETED", 120)
    cluster.wait(third, "CANCELLED", 30)
    cluster.wait(after, "COMPLETED", 120)
    work.assert_one_clean_run()
    assert list((work.folder / "evaluation").iterdir())


@pytest.mark.soak
def test_an_evaluation_is_cancelled_when_training_fails(
    work: Work, fault: Callable[[str, str], None]
) -> None:
    fault("True", 'raise RuntimeError("no luck")')
    work.submit(*ONE_TASK, "slurm.then=[evaluate]")
    job, after = work.jobs()
    work.cluster.wait(job, "FAILED", 120)
    work.cluster.wait(after, "CANCELLED", 60)


@pytest.mark.soak
def test_a_sweep_is_one_array_of_runs_below_a_parent(work: Work, cluster: Cluster) -> None:
    axes = ["model.attention.kind=softmax,conformal_sympow", "data.context=64,128"]
    brief = [*ONE_TASK, "trainer.max_tokens=2048", "trainer.micro_batch=1"]
    work.submit(*brief, "--sweep", *axes, "--throttle", "2")
    (array,) = work.jobs("small-sweep")
    most = 0
    deadline = time.monotonic() + 200
    while rows := cluster.run("squeue", "-h", "-r", "-j", array, "-o", "%T").stdout.split():
        most = max(most, rows.count("RUNNING"))
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert most == 2
    client = MlflowClient(f"sqlite:///{work.path}/mlflow.db")
    experiment = client.get_experiment_by_name("tests")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    parents = [run for run in runs if run.info.run_name == "small-sweep"]
    nested = [run for run in runs if run.info.run_name != "small-sweep"]
    assert len(parents) == 1
    assert {run.data.tags["mlflow.parentRunId"] for run in nested} == {parents[0].info.run_id}
    assert {run.info.run_name for run in nested} == {
        f"small-kind={kind}-context={context}"
        for kind in ("softmax", "conformal_sympow")
        for context in (64, 128)
    }
    assert {run.info.status for run in runs} == {"FINISHED"}


def test_a_large_job_is_accepted(make_work: MakeWork, make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(nodes=4, cpus=64, gpus=8, gpu_type="h100", extra="Feature=nvlink")
    small = make_work()
    work = Work(cluster, small.path)
    work.submit(
        *("trainer.nodes=4", "trainer.devices=8", "trainer.micro_batch=1"),
        *("optim.tokens_per_update=2048", "slurm.gpu=h100", "slurm.cpus_per_task=8"),
        *("slurm.account=physics", "slurm.constraint=nvlink", "slurm.exclusive=true"),
        *("slurm.time=1-00:00:00", "slurm.memory=60G", "slurm.extra=[--hold]"),
    )
    (job,) = work.jobs()
    found = cluster.job(job)
    assert found["NumNodes"] == "4-4"
    assert found["NumTasks"] == "32"
    assert found["TresPerNode"] == "gres:gpu:h100:8"
    assert (found["Account"], found["Features"]) == ("physics", "nvlink")
    assert (found["TimeLimit"], found["OverSubscribe"]) == ("1-00:00:00", "NO")


def test_a_job_that_cannot_fit_is_refused(work: Work) -> None:
    # 8 layers of 16,384 hold 26 billion parameters; one A100 has 80 GB.
    large = ["model.layers=8", "model.width=16384", "model.heads=128", "slurm.gpu=a100"]
    done = work.submit(*ONE_TASK, *large, check=False)
    assert done.returncode == 2
    assert "does not fit" in done.stderr
    assert not (work.path / "runs").exists()


def test_a_dry_run_prints_the_script_and_leaves_nothing(work: Work) -> None:
    done = work.submit("--dry-run")
    assert done.stdout.startswith("#!/bin/bash\n#SBATCH --job-name=small\n")
    assert {path.name for path in work.path.iterdir()} == {"small.yaml"}


@pytest.mark.parametrize("template", sorted((CHECKOUT / "slurm").glob("*.sbatch")))
def test_templates_are_sound(template: Path, make_cluster: Callable[..., Cluster]) -> None:
    make_cluster()  # which tells where the packages are missing
    subprocess.run(["bash", "-n", str(template)], check=True)
    subprocess.run(["shellcheck", "--shell=bash", str(template)], check=True)
