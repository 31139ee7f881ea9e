"""What the watchdog decides; test_preemption.py kills, stops and hangs real ranks."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from longhaul.pipeline.distributed import watchdog
from longhaul.pipeline.distributed.watchdog import Watchdog

HERE = watchdog.process_space()


def heartbeat(space: str = HERE, process: int = os.getpid()) -> str:
    """A rank's; by default its process runs."""
    return json.dumps([5, "computing", "file.py:1 function", 0.0, space, process])


@pytest.fixture(params=["waited for", "not waited for"])
def ended_process(request: pytest.FixtureRequest) -> Iterator[int]:
    """The number of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        leaves = os.WNOWAIT if request.param == "not waited for" else 0
        os.waitid(os.P_PID, process.pid, os.WEXITED | leaves)
        yield process.pid


class Store(dict[str, bytes]):
    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def wait(self, keys: list[str], _: object) -> None:
        assert self.check(keys)

    def delete_key(self, key: str) -> None:
        self.pop(key, None)


def make_watchdog(rank: int, store: Store) -> Any:
    """Of one rank of two; its threads have ended before it has the store, so they write nothing."""
    dog: Any = Watchdog(rank, 2, hang_s=100, on_abort=lambda: None)
    dog._stopping.set()
    for thread in threading.enumerate():
        if thread.name == "watchdog":
            thread.join(20)
    dog._store = store
    return dog


@pytest.fixture
def first(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of rank 0, and it notes the status of an end."""
    dog = make_watchdog(0, Store())
    dog.ends = []
    monkeypatch.setattr(os, "_exit", dog.ends.append)
    monkeypatch.setattr(watchdog, "HEARTBEAT_S", 0.01)
    return dog


@pytest.mark.parametrize("seconds", [0.3, 1.0, 7.0])
def test_a_silent_rank_is_told_of_once_and_taken_for_dead_after_minutes(
    first: Any,
    seconds: float,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(watchdog, "HEARTBEAT_S", seconds)
    monkeypatch.setattr(watchdog.time, "sleep", lambda _: None)
    times, told = 0, list[float]()
    while not first.ends:
        first._heartbeats[1] = heartbeat(), times
        first._check_silence(1, heartbeat(), times)
        told.extend([times * seconds] * (len(caplog.messages) - len(told)))
        times += 1
    assert len(caplog.messages) == 2, "silent, and then that the job is ended"
    assert told[0] - seconds < watchdog.SILENT_S <= told[0]
    assert told[1] - seconds < watchdog.DEAD_S <= told[1], "more than the minute that is forgiven"
    assert watchdog.DEAD_S > 60
    assert b"rank 1 is gone, last seen after step 5" in first._store["longhaul/abort"]


def test_a_rank_that_finishes_while_it_is_looked_for_is_not_gone(first: Any) -> None:
    def has_ended(rank: int) -> bool:
        first._store.set(f"longhaul/finished{rank}", "")  # right before the rank ends
        return True

    first._has_ended = has_ended
    first._check_silence(1, heartbeat(), 10_000)
    assert not first.ends


def test_an_ended_rank_is_gone(
    first: Any, ended_process: int, capfd: pytest.CaptureFixture[str]
) -> None:
    last = heartbeat(process=ended_process)
    first._heartbeats[1] = last, 500
    first._check_silence(1, last, 500)  # five seconds, since it may fail by itself before
    assert first.ends == [1]
    assert b"rank 1 is gone, last seen after step 5" in first._store["longhaul/abort"]
    assert "longhaul: rank 1 is gone" in capfd.readouterr().err


def test_an_ended_rank_that_said_why_is_quoted(
    first: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    first._store.set("longhaul/failed1", "OutOfGpuMemory: too little")
    first._check_silence(1, heartbeat(), 100_000)
    assert first.ends == [1]
    assert "longhaul: rank 1 failed: OutOfGpuMemory: too little" in capfd.readouterr().err


def test_a_rank_ends_though_nothing_else_works(first: Any) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no such luck")

    first._store.set = first._on_abort = fail
    with pytest.raises(RuntimeError, match="no such luck"):
        first._abort("no progress")
    assert first.ends == [1]


def test_one_thread_alone_ends_the_process(first: Any) -> None:
    began, goes_on, calls = threading.Event(), threading.Event(), list[str]()

    def record() -> None:
        calls.append("recorded")
        began.set()
        goes_on.wait(20)

    first._on_abort = record
    threads = [
        threading.Thread(target=first._end, args=(reason,), daemon=True)
        for reason in ("one reason", "another")
    ]
    threads[0].start()
    assert began.wait(20)
    threads[1].start()
    threads[1].join(0.1)
    assert not first.ends
    goes_on.set()
    threads[0].join(20)
    assert (calls, first.ends) == (["recorded"], [1])


@pytest.mark.parametrize("space", [HERE, "elsewhere"])
def test_only_processes_that_can_be_seen_are_looked_for(
    first: Any, ended_process: int, space: str
) -> None:
    assert not first._has_ended(1), "it has not reported yet"
    first._heartbeats[1] = heartbeat(space), 0
    assert not first._has_ended(1)
    first._heartbeats[1] = heartbeat(space, ended_process), 0
    assert first._has_ended(1) == (space == HERE)


def test_a_stop_leaves_no_key_for_the_next_watchdog(first: Any) -> None:
    first._store.set("longhaul/finished1", "")
    first.stop()
    assert not first._store


def test_the_others_leave_once_the_first_has_seen_all(first: Any) -> None:
    dog = make_watchdog(1, first._store)
    thread = threading.Thread(target=dog.stop, daemon=True)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    first.stop()
    thread.join(20)
    assert not thread.is_alive()
    assert not first._store


@pytest.mark.parametrize("seconds", [60.0, 4000.0])
def test_a_process_that_was_stopped_for_a_while_goes_on(
    first: Any,
    seconds: float,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One rank alone, on a clock of its own: its fifth turn comes so late."""
    clock = SimpleNamespace(now=0.0, turns=0)

    def wait(timeout: float) -> bool:
        clock.turns += 1
        clock.now += seconds if clock.turns == 5 else timeout
        return bool(clock.turns > turns)

    monkeypatch.setattr(watchdog, "HEARTBEAT_S", 1.0)
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: clock.now))
    first._store, first._stopping = None, SimpleNamespace(wait=wait)
    first._since = first._last_sent = 0.0
    turns = 30
    first._check_progress()
    assert caplog.messages == [f"rank 0 was stopped for {seconds - 1:.0f} s, and goes on"]
    assert not first.ends


def test_each_rank_has_the_heartbeat_that_it_sent() -> None:
    one = Watchdog.__new__(Watchdog)  # without its threads
    one._store = dist.TCPStore("127.0.0.1", 0, 1, True)
    one._world_size, one._heartbeats = 4, {}
    one._store.set("longhaul/rank2", "b")
    one._read_heartbeats()
    assert one._heartbeats == {2: ("b", 0)}
    for rank, text in ((1, "a"), (3, "c")):
        one._store.set(f"longhaul/rank{rank}", text)
    one._read_heartbeats()
    one._store.set("longhaul/rank3", "d")
    one._read_heartbeats()
    assert one._heartbeats == {1: ("a", 1), 2: ("b", 2), 3: ("d", 0)}
