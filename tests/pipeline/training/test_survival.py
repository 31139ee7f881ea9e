"""Kills, pauses, strangers and company at random moments: a table of tries, and nothing lost.

Each try is a row that is printed: what was done, when, how the run ended, what it said. Rows of one
kind are of one run, which is started again after each end. What it has come to in the end is
compared with a run that nothing disturbed.
"""

import json
import os
import random
import signal
import socket
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil
import pytest
import torch
from mlflow.tracking import MlflowClient
from tries import COMMON, KILLED, SEED, Row, note, said_last, table, wait_for

from longhaul.pipeline.checkpoints.folders import newest_checkpoint
from longhaul.pipeline.checkpoints.integrity import verify
from longhaul.pipeline.checkpoints.reader import SavedCheckpoint

__all__ = ["table"]  # a fixture

pytestmark = pytest.mark.soak

Run = Any  # conftest.RunFolder: modules of this folder cannot import each other

UPDATES = 240
ZERO = ["trainer.strategy=deepspeed", "trainer.devices=2"]
STRATEGIES = {
    "single": [],
    "ddp": ["trainer.strategy=ddp", "trainer.devices=2"],
    "fsdp": ["trainer.strategy=fsdp", "trainer.devices=2"],
    "deepspeed1": [*ZERO, "trainer.deepspeed_stage=1"],
    "deepspeed2": [*ZERO, "trainer.deepspeed_stage=2"],
    "deepspeed3": [*ZERO, "trainer.deepspeed_stage=3"],
    "fsdp of 4": ["trainer.strategy=fsdp", "trainer.devices=4", "trainer.micro_batch=1"],
}
# What is done to a training, and the statuses with which it may end.
FAILED = 1
WAYS: dict[str, tuple[int, ...]] = {
    "kill one rank": (KILLED, FAILED),
    "kill all ranks": (KILLED,),
    "SIGTERM": (75,),
    "SIGUSR1 to one rank": (75,),
    "STOP": (75,),
    "kill while it saves": (KILLED, FAILED),
    "kill while it validates": (KILLED, FAILED),
    "kill while it evaluates": (KILLED, FAILED),
    "kill while it uploads": (KILLED, FAILED),
    "SIGINT twice": (130,),
    "pause rank 0, then SIGTERM": (75,),
    "pause the last rank, then SIGTERM": (75,),
    "pause all ranks, then SIGTERM": (75,),
}


def ranks_of(process: Any) -> list[psutil.Process]:
    """The processes of the ranks, as far as they have started."""
    first = psutil.Process(process.pid)
    others = {}
    for child in first.children():
        with suppress(psutil.Error):
            others[int(child.environ().get("LOCAL_RANK") or 0)] = child
    others.pop(0, None)
    return [first, *(others[rank] for rank in sorted(others))]


def lines_of(run: Run) -> int:
    return run.trace.read_bytes().count(b"\n") if run.trace.exists() else 0


def wait_for_lines(run: Run, process: Any, count: int) -> None:
    """Until a process has begun so many more micro-batches."""
    before = lines_of(run)
    wait_for(lambda: lines_of(run) >= before + count, process)


def strike(run: Run, process: Any, way: str, chance: random.Random) -> None:
    """Do to a training what a way is called."""
    folder = run.path / "small"
    marks: dict[str, Callable[[], bool]] = {
        "kill while it saves": lambda: any((folder / "checkpoints").glob(".saving-*")),
        "kill while it validates": (run.path / "validating").exists,
        "kill while it evaluates": (run.path / "evaluating").exists,
        "kill while it uploads": (run.path / "mlflow.db-journal").exists,
    }
    if way in marks:
        wait_for(marks[way], process)
        way = chance.choice(["kill one rank", "kill all ranks"])
    ranks = ranks_of(process)
    if way == "kill one rank":
        chance.choice(ranks).kill()
    elif way == "kill all ranks":
        os.killpg(process.pid, signal.SIGKILL)
    elif way == "SIGUSR1 to one rank":
        chance.choice(ranks).send_signal(signal.SIGUSR1)
    elif way == "STOP":
        (folder / "STOP").touch()
    elif way == "SIGINT twice":
        send = chance.choice([os.killpg, os.kill])  # as a terminal does, or to rank 0 alone
        for seconds in (chance.random(), 0):
            with suppress(ProcessLookupError):
                send(process.pid, signal.SIGINT)
            time.sleep(seconds)
    elif way.startswith("pause"):
        paused = ranks if "all" in way else ranks[-1:] if "last" in way else ranks[:1]
        for rank in paused:
            rank.suspend()
        time.sleep(chance.uniform(1, 8))
        for rank in paused:
            rank.resume()
        wait_for_lines(run, process, 4 * len(ranks))
        os.killpg(process.pid, signal.SIGTERM)
    else:
        os.killpg(process.pid, signal.SIGTERM)


def check_folder(run: Run) -> None:
    """What is there is whole, after whatever end."""
    for path in (run.path / "small" / "checkpoints").glob("step-*"):
        verify(path)
    journal = (run.path / "small" / "logs" / "metrics.jsonl").read_bytes()
    for line in journal.splitlines()[:-1]:
        json.loads(line)


def survive(
    run: Run,
    kind: str,
    legs: list[list[str]],
    ways: list[str],
    table: list[Row],
    chance: random.Random,
) -> None:
    """Start a run with the options of each leg, end it in a way, and let it end by itself."""
    for number, way in enumerate(ways):
        process = run.start("train", "small.yaml", *COMMON, *legs[number % len(legs)])
        # A new process begins with the step of its checkpoint, which the trace may have already.
        wait_for_lines(run, process, chance.randrange(2, 40))
        time.sleep(chance.random() * 0.05)
        strike(run, process, way, chance)
        step, began = run.last_step, time.monotonic()
        status, error = process.end(seconds=90)
        seconds = time.monotonic() - began
        assert status in WAYS[way], f"{way}: {status}\n{error}"
        assert status == KILLED or said_last(error), way
        # A data worker that is just being started prints one if its rank is killed.
        orphans = error.count("EOFError: Ran out of input") if way.startswith("kill") else 0
        assert error.count("Traceback") == orphans, error
        check_folder(run)
        for name in ("validating", "evaluating"):
            (run.path / name).unlink(missing_ok=True)
        note(table, Row(kind, way, f"step {step}", f"{status}", seconds, said_last(error)))
    process = run.start("train", "small.yaml", *COMMON, *legs[len(ways) % len(legs)])
    status, error = process.end(seconds=600)
    assert status == 0, error


def weights(run: Run) -> dict[str, torch.Tensor]:
    newest = newest_checkpoint(run.path / "small" / "checkpoints")
    assert newest is not None
    return SavedCheckpoint(newest, "model").read_group("model")


def losses(run: Run) -> dict[int, float]:
    lines = (run.path / "small" / "logs" / "metrics.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    found = [(e["step"], e["values"]["curves/train_loss"]) for e in entries if e["kind"] == "train"]
    assert [step for step, _ in found] == sorted({step for step, _ in found})
    return dict(found)


def assert_samples_are_read_once(run: Run, num_updates: int) -> None:
    """Each sample is of one step, and a step that is repeated reads the same tokens again."""
    seen: dict[tuple[int, ...], int] = {}
    steps = defaultdict(set)
    for line in run.trace.read_text().splitlines():
        entry = json.loads(line)
        key = entry["step"], *entry["index"]
        assert seen.setdefault(key, entry["crc"]) == entry["crc"], "a repeated step differs"
        for index in entry["index"]:
            steps[index].add(entry["step"])
    assert sorted(steps) == list(range(num_updates * 8))
    assert all(found == {index // 8} for index, found in steps.items())


def assert_nothing_lost(run: Run, num_updates: int = UPDATES) -> None:
    """Every step and sample once, in the folder and in MLflow, and no half-written file."""
    folder = run.path / "small"
    done = json.loads((folder / "DONE").read_text())
    assert done == {"step": num_updates, "tokens": num_updates * 512, "is_tracked": True}
    assert list(losses(run)) == list(range(1, num_updates + 1))
    assert_samples_are_read_once(run, num_updates)
    client = MlflowClient(f"sqlite:///{run.path}/mlflow.db")
    experiment = client.get_experiment_by_name("tests")
    assert experiment is not None
    (tracked,) = client.search_runs([experiment.experiment_id])
    assert tracked.info.status == "FINISHED"
    history = client.get_metric_history(tracked.info.run_id, "curves/train_loss")
    assert sorted(point.step for point in history) == list(range(1, num_updates + 1))
    assert {point.step: point.value for point in history} == losses(run)
    left = [path.name for path in folder.rglob("*") if path.name.startswith(".")]
    left += [path.name for path in folder.rglob("*.damaged*")]
    assert not left


def assert_same_bits(found: Run, wanted: Run) -> None:
    one, other = weights(found), weights(wanted)
    assert all(torch.equal(one[name], other[name]) for name in other)
    assert losses(found) == losses(wanted)


@pytest.fixture(scope="module")
def undisturbed(make_run: Any) -> Callable[..., Run]:
    """The run of a strategy that nothing disturbs."""
    runs: dict[str, Run] = {}

    def get(strategy: str) -> Run:
        if strategy not in runs:
            runs[strategy] = run = make_run(UPDATES)
            process = run.start("train", "small.yaml", *COMMON, *STRATEGIES[strategy])
            status, error = process.end(seconds=600)
            assert status == 0, error
            assert_nothing_lost(run)
        return runs[strategy]

    return get


@pytest.mark.parametrize("strategy", ["single", "fsdp", "deepspeed3", "deepspeed1", "ddp"])
def test_ended_in_every_way_at_any_moment_a_run_comes_to_the_same(
    make_run: Any, undisturbed: Any, table: list[Row], strategy: str
) -> None:
    run, chance = make_run(UPDATES), random.Random(f"{SEED} {strategy}")
    ways = list(WAYS)
    chance.shuffle(ways)
    survive(run, strategy, [STRATEGIES[strategy]], ways, table, chance)
    assert_nothing_lost(run)
    assert_same_bits(run, undisturbed(strategy))


def test_ended_and_resumed_under_other_strategies_and_numbers_of_ranks(
    make_run: Any, undisturbed: Any, table: list[Row]
) -> None:
    run, chance = make_run(UPDATES), random.Random(f"{SEED} resume")
    legs = [*STRATEGIES.values()]
    chance.shuffle(legs)
    ways = [way for way in WAYS if not way.startswith(("pause", "SIGINT"))]
    chance.shuffle(ways)
    survive(run, "each time another strategy", legs, ways, table, chance)
    assert_nothing_lost(run)
    found, wanted = losses(run), losses(undisturbed("single"))
    # Rounding grows: two strategies that nothing disturbs agree to 1e-4 for 60 updates, and differ
    # by 0.02 after 240.
    assert max(abs(found[step] - wanted[step]) for step in range(1, 61)) < 1e-4
    assert max(abs(found[step] - wanted[step]) for step in wanted) < 0.05


def ports_of(process: Any) -> list[int]:
    """Where the ranks of a training listen."""
    found = []
    for rank in ranks_of(process):
        with suppress(psutil.Error):
            connections = rank.net_connections("inet")
            found += [one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN]
    return sorted(set(found))


def annoy(port: int, how: str, held: list[socket.socket], chance: random.Random) -> None:
    """Connect to a port as somebody who is no rank would."""
    for _ in range({"hold 100": 100, "open and close 300": 300}.get(how, 1)):
        with suppress(OSError):
            stranger = socket.create_connection(("127.0.0.1", port), 5)
            held.append(stranger)
            stranger.settimeout(1)
            if how == "garbage":
                stranger.sendall(chance.randbytes(chance.choice([1, 16, 4096])))
            elif how == "half a handshake":
                stranger.sendall(b"\x00")
            elif how == "an HTTP request":
                stranger.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            elif how == "open and close 300":
                held.pop().close()


STRANGE = ("garbage", "hold 100", "open and close 300", "half a handshake", "an HTTP request")


@pytest.mark.parametrize("moment", ["from the start", "during training"])
@pytest.mark.parametrize("how", STRANGE)
def test_strangers_on_the_ranks_ports(
    make_run: Any, table: list[Row], how: str, moment: str
) -> None:
    run, chance = make_run(60), random.Random(f"{SEED} {how} {moment}")
    held: list[socket.socket] = []
    process = run.start("train", "small.yaml", *COMMON, *STRATEGIES["ddp"])
    asked: set[int] = set()
    if moment == "during training":
        wait_for_lines(run, process, chance.randrange(2, 40))
    deadline = time.monotonic() + 90
    while process.poll() is None and time.monotonic() < deadline:
        new = [] if lines_of(run) > 150 else [p for p in ports_of(process) if p not in asked]
        for port in new:
            annoy(port, how, held, chance)
            asked.add(port)
        time.sleep(0.02)
    began = time.monotonic()
    status, error = process.end(seconds=90)
    for one in held:
        one.close()
    row = Row("strangers", f"{how}, {moment}", f"{len(asked)} ports", f"{status}", 0.0, "")
    note(table, row._replace(seconds=time.monotonic() - began, said=said_last(error)))
    assert status == 0, error
    assert_nothing_lost(run, 60)


@pytest.mark.parametrize("strategy", ["single", "ddp"])
@pytest.mark.parametrize("seconds", [3600, -3600])
def test_the_clock_is_set(
    make_run: Any,
    undisturbed: Any,
    table: list[Row],
    monkeypatch: pytest.MonkeyPatch,
    strategy: str,
    seconds: int,
) -> None:
    run, chance = make_run(UPDATES), random.Random(f"{SEED} {strategy} {seconds}")
    monkeypatch.setenv("LONGHAUL_CLOCK", f"{chance.randrange(2, 60)}:{seconds}")
    way = f"clock {seconds:+d} s"
    survive(run, strategy, [STRATEGIES[strategy]], ["SIGTERM"], [], chance)
    note(table, Row(strategy, way, os.environ["LONGHAUL_CLOCK"], "0", 0.0, ""))
    assert_nothing_lost(run)
    assert_same_bits(run, undisturbed(strategy))


@pytest.mark.parametrize("number", range(6))
def test_two_trainings_in_one_folder(make_run: Any, table: list[Row], number: int) -> None:
    run, chance = make_run(60), random.Random(f"{SEED} two {number}")
    strategy = chance.choice(["single", "ddp"])
    first = run.start("train", "small.yaml", *COMMON, *STRATEGIES[strategy])
    if delay := number % 2:
        wait_for_lines(run, first, chance.randrange(1, 20))
    second = run.start("train", "small.yaml", *COMMON, *STRATEGIES[strategy])
    began = time.monotonic()
    ends = sorted([first.end(seconds=120), second.end(seconds=120)], key=lambda end: end[0])
    moment = "later" if delay else "at once"
    seconds = time.monotonic() - began
    row = Row(
        strategy, f"a second training, {moment}", "", f"{ends[0][0]} and {ends[1][0]}", seconds, ""
    )
    note(table, row._replace(said=said_last(ends[1][1])))
    assert [status for status, _ in ends] == [0, 73], ends
    assert "is being written by another process" in ends[1][1]
    assert_nothing_lost(run, 60)


COMPANY = {
    "export": lambda run, number: ["export", "small", f"exported-{number}"],
    "report": lambda run, number: ["report", "tests", f"report-{number}", "--uri", uri(run)],
    "evaluate": lambda run, number: ["evaluate", "small", "--tasks", "perplexity,positions"],
    "generate": lambda run, number: ["generate", "small", "--prompt", "def", "--tokens", "8"],
    "status": lambda run, number: ["status", "small"],
}


def uri(run: Run) -> str:
    return f"sqlite:///{run.path}/mlflow.db"


def test_others_read_a_run_while_it_trains(
    make_run: Any, undisturbed: Any, table: list[Row]
) -> None:
    run, chance = make_run(UPDATES), random.Random(f"{SEED} company")
    process = run.start("train", "small.yaml", *COMMON, *STRATEGIES["ddp"])
    wait_for(lambda: newest_checkpoint(run.path / "small" / "checkpoints") is not None, process)
    for number, (what, arguments) in enumerate(2 * list(COMPANY.items())):
        began, step = time.monotonic(), run.last_step
        command = run.start(*arguments(run, number))
        if is_killed := number >= len(COMPANY):
            time.sleep(chance.random())
            with suppress(ProcessLookupError):  # it may have ended by itself
                command.send_signal(signal.SIGKILL)
        status, error = command.end()
        seconds = time.monotonic() - began
        way = f"{what}, killed" if is_killed else what
        note(table, Row("ddp, read meanwhile", way, f"step {step}", f"{status}", seconds, ""))
        # A report needs a run that is finished, and says so.
        wanted = {0, 2} if what == "report" and "wanted a finished run" in error else {0}
        assert status in (wanted | {KILLED} if is_killed else wanted), error
    status, error = process.end(seconds=300)
    assert status == 0, error
    assert_nothing_lost(run)
    assert_same_bits(run, undisturbed("ddp"))
