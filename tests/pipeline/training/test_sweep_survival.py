"""Sweeps whose processes are killed, and two sweeps at once: a table of tries, and nothing lost."""

import json
import random
import signal
import time
from contextlib import suppress
from typing import Any

import psutil
import pytest
from mlflow.tracking import MlflowClient
from tries import COMMON, KILLED, SEED, Row, note, said_last, table, wait_for

__all__ = ["table"]  # a fixture

pytestmark = pytest.mark.soak

Run = Any  # conftest.RunFolder: modules of this folder cannot import each other

UPDATES = 240
SWEEP_WAYS = {
    "kill the sweep": (KILLED,),
    "kill a run": (1,),
    "kill the sweep and its run": (KILLED,),
    "SIGTERM to the sweep": (75,),
    "SIGINT twice to the sweep": (130,),
}
SWEEP = ("--sweep", "trainer.seed=1,2", "data.workers=0", "evaluation.tasks=[]")


def journaled(run: Run, name: str) -> list[int]:
    """The updates in a run's journal."""
    journal = run.path / name / "logs" / "metrics.jsonl"
    lines = journal.read_bytes().splitlines() if journal.exists() else []
    found = [json.loads(line) for line in lines if line.endswith(b"}")]
    return [line["step"] for line in found if line["kind"] == "train"]


def processes_of(run: Run) -> list[psutil.Process]:
    """The runs of a sweep, whose configs are in the folder of the test."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if any(f"{run.path}/" in word and "-sweep/" in word for word in process.cmdline()):
                found.append(process)
    return found


def assert_sweep_is_whole(run: Run, names: list[str], num_updates: int) -> None:
    client = MlflowClient(f"sqlite:///{run.path}/mlflow.db")
    experiment = client.get_experiment_by_name("tests")
    assert experiment is not None
    tracked = {one.info.run_name: one for one in client.search_runs([experiment.experiment_id])}
    assert len(client.search_runs([experiment.experiment_id])) == len(tracked)
    for name in names:
        assert tracked[name].info.status == "FINISHED"
        assert journaled(run, name) == list(range(1, num_updates + 1))
        history = client.get_metric_history(tracked[name].info.run_id, "curves/train_loss")
        assert sorted(point.step for point in history) == list(range(1, num_updates + 1))


def test_sweeps_that_are_killed(make_run: Any, table: list[Row]) -> None:
    run, chance = make_run(UPDATES), random.Random(f"{SEED} sweep")
    names = ["small-seed=1", "small-seed=2"]
    for way, wanted in SWEEP_WAYS.items():
        before = sum(len(journaled(run, name)) for name in names)
        process = run.start("train", "small.yaml", *COMMON, *SWEEP)
        more = before + chance.randrange(2, 60)

        def has_trained(more: int = more) -> bool:
            return sum(len(journaled(run, name)) for name in names) >= more

        wait_for(has_trained, process)
        children = processes_of(run)
        assert children
        if way == "kill a run":
            children[0].kill()
        elif way.startswith("kill"):
            process.send_signal(signal.SIGKILL)
            if way.endswith("run"):
                children[0].kill()
        else:
            number = signal.SIGINT if "INT" in way else signal.SIGTERM
            process.send_signal(number)
            if "twice" in way:
                time.sleep(chance.random())
                with suppress(ProcessLookupError):
                    process.send_signal(number)
        began = time.monotonic()
        status, error = process.end(seconds=300)
        _, alive = psutil.wait_procs(children, timeout=60)
        seconds = time.monotonic() - began
        note(table, Row("sweep", way, f"update {more}", f"{status}", seconds, said_last(error)))
        assert not alive
        assert not processes_of(run)
        assert status in wanted, error
    status, error = run.start("train", "small.yaml", *COMMON, *SWEEP).end(seconds=300)
    assert status == 0, error
    assert_sweep_is_whole(run, names, UPDATES)


def test_two_sweeps_in_one_database(make_run: Any, table: list[Row]) -> None:
    run = make_run(60)
    commands = [
        run.start("train", "small.yaml", f"name={name}", *COMMON, *SWEEP) for name in ("a", "b")
    ]
    began = time.monotonic()
    ends = [command.end(seconds=300) for command in commands]
    statuses = " and ".join(str(status) for status, _ in ends)
    seconds = time.monotonic() - began
    note(table, Row("sweep", "another one in the same database", "", statuses, seconds, ""))
    assert [status for status, _ in ends] == [0, 0], ends
    names = [f"{name}-seed={seed}" for name in ("a", "b") for seed in (1, 2)]
    assert_sweep_is_whole(run, names, 60)


def test_the_same_sweep_twice_at_once(make_run: Any, table: list[Row]) -> None:
    run = make_run(60)
    commands = [run.start("train", "small.yaml", *COMMON, *SWEEP) for _ in range(2)]
    began = time.monotonic()
    ends = [command.end(seconds=300) for command in commands]
    statuses = " and ".join(str(status) for status, _ in ends)
    last = said_last(max(ends, key=lambda end: end[0])[1])
    seconds = time.monotonic() - began
    note(table, Row("sweep", "the same one at once", "", statuses, seconds, last))
    assert {status for status, _ in ends} <= {0, 73}, ends
    status, error = run.start("train", "small.yaml", *COMMON, *SWEEP).end(seconds=300)
    assert status == 0, error
    assert_sweep_is_whole(run, ["small-seed=1", "small-seed=2"], 60)
