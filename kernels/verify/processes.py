"""Tasks in processes of their own, so that one that crashes, or breaks a device, ends alone."""

from __future__ import annotations

import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, NamedTuple, TypeVar

TaskT = TypeVar("TaskT")

OUT_OF_TIME = "skipped: out of time"


class Outcome(NamedTuple):
    """What became of a task: a result, or the problem that it met."""

    result: Any
    problem: str | None


def run_tasks(
    function: Callable[[TaskT], object],
    tasks: Sequence[TaskT],
    *,
    num_processes: int,
    deadline: float,
) -> list[Outcome]:
    """`function` of every task, started in their order. No problem stops the others.

    Args:
        function: importable by name. What it raises becomes the task's problem and ends its
            process, as the device may be broken there: the next task finds a fresh one.
        num_processes: how many at once; 0 runs every task in this process.
        deadline: a moment of `time.monotonic`. Tasks that are not done by then are given up.
    """
    if num_processes == 0:
        outcomes: list[Outcome] = []
        for task in tasks:
            is_late = time.monotonic() > deadline
            outcomes.append(Outcome(None, OUT_OF_TIME) if is_late else _attempt(function, task))
        return outcomes
    crew = _Crew(function)
    try:
        return crew.work(tasks, num_processes, deadline)
    finally:
        for process in crew.processes.values():
            process.kill()
            process.join()


def _attempt(function: Callable[[Any], Any], task: Any) -> Outcome:
    try:
        return Outcome(function(task), None)
    except Exception as error:
        first_line = (str(error).splitlines() or [""])[0]
        return Outcome(None, f"{type(error).__name__}: {first_line}"[:500])


def _serve(function: Callable[[Any], Any], tasks: Connection) -> None:
    """The life of a worker: it ends at its first problem, or when killed."""
    outcome: Outcome = Outcome(None, None)
    while outcome.problem is None:
        outcome = _attempt(function, tasks.recv())
        tasks.send(tuple(outcome))


class _Crew:
    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function
        self.processes: dict[Connection, SpawnProcess] = {}

    def work(self, tasks: Sequence[Any], num_processes: int, deadline: float) -> list[Outcome]:
        outcomes: list[Outcome] = [Outcome(None, OUT_OF_TIME)] * len(tasks)
        waiting = deque(range(len(tasks)))
        idle: list[Connection] = []
        busy: dict[Connection, int] = {}
        while waiting or busy:
            while waiting and len(busy) < num_processes:
                worker = idle.pop() if idle else self._hire()
                busy[worker] = waiting.popleft()
                worker.send(tasks[busy[worker]])
            ready = wait(list(busy), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for worker in [one for one in busy if one in ready]:
                outcomes[busy.pop(worker)], is_alive = self._hear(worker)
                if is_alive:
                    idle.append(worker)
        return outcomes

    def _hire(self) -> Connection:
        # Spawned, not forked: a fork would share what this process did with the device.
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(target=_serve, args=(self.function, there), daemon=True)
        process.start()
        # With the only other end in the worker, its death reads as an end of file here.
        there.close()
        self.processes[here] = process
        return here

    def _hear(self, worker: Connection) -> tuple[Outcome, bool]:
        """What became of the worker's task, and whether the worker can take another."""
        try:
            outcome: Outcome = Outcome(*worker.recv())
        except (EOFError, OSError):
            self.processes[worker].join()
            code = self.processes[worker].exitcode
            outcome = Outcome(None, f"the process died with exit code {code}")
        if outcome.problem is None:
            return outcome, True
        worker.close()
        return outcome, False
