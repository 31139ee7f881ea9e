"""What the watchdog decides; test_preemption.py kills, stops and hangs real ranks."""

import json
import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from longhaul.pipeline.distributed import watchdog
from longhaul.pipeline.distributed.lifelines import ADDRESS_KEY, Lifelines
from longhaul.pipeline.distributed.watchdog import Watchdog

HEARTBEAT = json.dumps([5, "computing", "file.py:1 function", 0.0])


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
    dog: Any = Watchdog(rank, 2, 1, hang_s=100, on_abort=lambda: None)
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
    monkeypatch.setattr(watchdog, "_HEARTBEAT_S", 0.01)
    return dog


@pytest.mark.parametrize("seconds", [0.3, 1.0, 7.0])
def test_a_silent_rank_is_told_of_once(
    first: Any,
    seconds: float,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(watchdog, "_HEARTBEAT_S", seconds)
    first._lifelines = SimpleNamespace(has=lambda rank: True, lost=set())
    for times in range(100):
        first._check_silence(1, HEARTBEAT, times)
        assert bool(caplog.messages) == (times * seconds >= watchdog._SILENCE_S)
    assert len(caplog.messages) == 1
    assert not first.ends


def test_a_rank_that_finishes_while_it_is_looked_for_is_not_gone(first: Any) -> None:
    lines = SimpleNamespace(has=lambda rank: True, lost=set[int]())
    first._lifelines = lines

    def check(keys: list[str]) -> bool:
        lines.lost.add(1)  # right after the answer, the rank finishes and closes its lifeline
        return False

    first._store.check = check
    first._check_silence(1, HEARTBEAT, 10_000)
    assert not first.ends


def test_an_ended_rank_is_gone(first: Any, capfd: pytest.CaptureFixture[str]) -> None:
    first._lifelines = SimpleNamespace(has=lambda rank: True, lost={1})
    first._check_silence(1, HEARTBEAT, 10_000)
    assert first.ends == [1]
    assert b"rank 1 is gone, last seen after step 5" in first._store["longhaul/abort"]
    assert "longhaul: rank 1 is gone" in capfd.readouterr().err


def test_an_ended_rank_that_said_why_is_quoted(
    first: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    first._lifelines = SimpleNamespace(has=lambda rank: True, lost={1})
    first._store.set("longhaul/failed1", "OutOfGpuMemory: too little")
    first._check_silence(1, HEARTBEAT, 10_000)
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


def test_a_stop_leaves_no_lifeline_and_no_key_for_the_next_watchdog(first: Any) -> None:
    first._store.set("longhaul/finished1", "")
    first._lifelines = Lifelines(0, 1, first._store)
    assert ADDRESS_KEY in first._store
    first.stop()
    assert not first._store
    assert not first._lifelines._thread.is_alive()


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

    monkeypatch.setattr(watchdog, "_HEARTBEAT_S", 1.0)
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: clock.now))
    first._store, first._stopping = None, SimpleNamespace(wait=wait)
    first._since = first._last_sent = 0.0
    turns = 30
    first._check_progress()
    assert caplog.messages == [f"rank 0 was stopped for {seconds - 1:.0f} s, and goes on"]
    assert not first.ends
