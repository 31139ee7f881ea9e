"""`longhaul train --sweep`: the runs of a sweep on one machine, stopped and resumed."""

import errno
import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from mlflow.tracking import MlflowClient

Run = Any  # conftest.RunFolder: modules of this folder cannot import each other

BRIEF = ("trainer.max_tokens=1024", "data.workers=0", "trainer.validate_every_tokens=1024")


def steps(run: Run, name: str) -> list[int]:
    """The updates in a run's journal."""
    journal = run.path / name / "logs" / "metrics.jsonl"
    lines = map(json.loads, journal.read_text().splitlines()) if journal.exists() else []
    return [line["step"] for line in lines if line["kind"] == "train"]


@pytest.mark.wide
def test_a_stopped_sweep_is_resumed_below_one_parent(run: Run) -> None:
    axes = ("--sweep", "model.attention.kind=softmax,sympow", "--sweep", "trainer.seed=1")
    names = [f"small-kind={kind}-seed=1" for kind in ("softmax", "sympow")]
    # Long enough to be stopped; the second command asks for less than that.
    command = run.start("train", "small.yaml", *axes, *BRIEF, "trainer.max_tokens=512000")
    deadline = time.monotonic() + 100
    while not steps(run, names[0]):
        assert time.monotonic() < deadline
        assert command.poll() is None, command.communicate()
        time.sleep(0.1)
    command.send_signal(signal.SIGINT)
    status, error = command.end()
    assert status == 130
    assert (
        f"sweep {run.path}/small-sweep: 1 run stopped, 0 trained by another process, 1 not" in error
    )
    checkpoint = sorted((run.path / names[0] / "checkpoints").glob("step-*"))[-1]
    stopped_at = int(checkpoint.name.removeprefix("step-"))
    assert steps(run, names[0])[-1] == stopped_at

    budget = f"trainer.max_tokens={512 * (stopped_at + 2)}"
    result = run.longhaul("train", "small.yaml", *axes, *BRIEF, budget, "--parallel", "2")
    for name in names:
        done = json.loads((run.path / name / "DONE").read_text())
        assert (done["step"], done["is_tracked"]) == (stopped_at + 2, True)
        assert steps(run, name) == list(range(1, stopped_at + 3))
        assert "is finished" in (run.path / "small-sweep" / "logs" / f"{name}.log").read_text()
    assert f"sweep {run.path}/small-sweep is finished\n" in result.stdout

    again = run.longhaul("train", "small.yaml", *axes, *BRIEF, budget)
    assert again.stdout.count("is finished already") == 2
    client = MlflowClient(f"sqlite:///{run.path}/mlflow.db")
    experiment = client.get_experiment_by_name("tests")
    assert experiment is not None
    tracked = {one.info.run_name: one for one in client.search_runs([experiment.experiment_id])}
    assert set(tracked) == {"small-sweep", *names}
    parent = tracked["small-sweep"].info.run_id
    assert {tracked[name].data.tags["mlflow.parentRunId"] for name in names} == {parent}
    assert {one.info.status for one in tracked.values()} == {"FINISHED"}


@pytest.mark.wide
def test_the_run_of_a_killed_sweep_saves_and_ends(run: Run) -> None:
    axis = ("--sweep", "trainer.seed=1")
    command = run.start("train", "small.yaml", *axis, *BRIEF, "trainer.max_tokens=512000")
    name = "small-seed=1"
    deadline = time.monotonic() + 100
    while not steps(run, name):
        assert time.monotonic() < deadline
        assert command.poll() is None, command.communicate()
        time.sleep(0.1)
    children = psutil.Process(command.pid).children()
    assert children
    command.send_signal(signal.SIGKILL)
    command.end()
    assert psutil.wait_procs(children, timeout=60)[1] == []
    newest = max((run.path / name / "checkpoints").glob("step-*"))
    assert steps(run, name)[-1] == int(newest.name.removeprefix("step-"))


@pytest.mark.wide
def test_a_run_that_fails_does_not_stop_the_others(run: Run) -> None:
    # A file where a run needs its folder of checkpoints.
    broken = run.path / "small-seed=1"
    broken.mkdir()
    (broken / "checkpoints").write_text("")
    result = run.longhaul("train", "small.yaml", "--sweep", "trainer.seed=1,2", *BRIEF, check=False)
    assert result.returncode == 1
    told = f"longhaul: sweep {run.path}/small-sweep: found 1 run that failed: small-seed=1 (status"
    assert result.stderr.splitlines()[-1].startswith(told)
    assert (run.path / "small-seed=2" / "DONE").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parallel", "2"], "--parallel: found 2 without --sweep, wanted both or none"),
        (["--sweep", "trainer.seed=1,2", "--parallel", "0"], "--parallel: found 0, wanted 1 or"),
        (["--sweep", "trainer.seed"], "--sweep: found 'trainer.seed', wanted key.sub=A,B"),
        (["--sweep", "data.manifest=nowhere"], "data.manifest: "),
        (["--sweep", "trainer.sed=1,2"], "trainer.sed: unknown key"),
        (["--sweep", "model.width=32,1048576"], "model.width and model.layers: found"),
    ],
)
def test_a_refused_sweep_writes_nothing(arguments: list[str], message: str, run: Run) -> None:
    before = sorted(run.path.rglob("*"))
    result = run.longhaul("train", "small.yaml", *arguments, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith(f"longhaul: {message}")
    assert sorted(run.path.rglob("*")) == before


def test_a_sweep_needs_enough_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from longhaul.configs import ConfigError
    from longhaul.pipeline.training.local_sweep import _environments

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5,3,1")
    assert [one["CUDA_VISIBLE_DEVICES"] for one in _environments(2, 2, 4)] == ["7,5", "3,1"]
    with pytest.raises(ConfigError, match="found 3 runs on 2 of 4 GPUs each, wanted at most 2"):
        _environments(3, 2, 4)


def test_a_run_that_cannot_be_started_stops_the_others(
    make_run: Callable[[int], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    from longhaul.pipeline.runs.sweep import Sweep, read_sweep
    from longhaul.pipeline.training import local_sweep

    run = make_run(1)
    sweep = read_sweep(str(run.path / "small.yaml"), [], ["trainer.seed=1,2"])
    monkeypatch.setattr(Sweep, "below_parent", lambda self: self)
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(*args: Any, **options: Any) -> "subprocess.Popen[bytes]":
        if started:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        started.append(popen(["sleep", "600"], start_new_session=True))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", start)
    try:
        with pytest.raises(OSError, match="temporarily unavailable"):
            local_sweep.train_sweep(sweep, parallel=2)
        assert started[0].poll() == -signal.SIGTERM
    finally:
        started[0].kill()
        started[0].wait()


def test_runs_that_another_process_trains_are_no_failures(
    make_run: Callable[[int], Run],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    from longhaul.pipeline.runs.sweep import Sweep, read_sweep
    from longhaul.pipeline.tracking.metrics_journal import EXIT_BUSY
    from longhaul.pipeline.training import local_sweep

    sweep = read_sweep(str(make_run(1).path / "small.yaml"), [], ["trainer.seed=1,2"])
    monkeypatch.setattr(Sweep, "below_parent", lambda self: self)
    statuses, popen = [EXIT_BUSY, 0], subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda *_, **__: popen(["sh", "-c", f"exit {statuses.pop(0)}"])
    )
    assert local_sweep.train_sweep(sweep, parallel=1) == EXIT_BUSY
    assert "0 runs stopped, 1 trained by another process, 0 not" in capfd.readouterr().err
