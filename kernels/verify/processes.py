"""Run each task in a worker process, so that a crash or a broken device ends one task only."""

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
    """A task's result, or the problem that prevented one."""

    result: Any
    problem: str | None


def run_tasks(
    function: Callable[[TaskT], object],
    tasks: Sequence[TaskT],
    *,
    num_processes: int,
    deadline: float,
) -> list[Outcome]:
    """Call `function` on every task, in order. A problem in one task does not stop the others.

    Args:
        function: importable by name. An exception becomes the task's problem and ends its worker
            process, whose device may be broken: the next task gets a new process.
        num_processes: worker processes at a time; 0 runs every task in this process.
        deadline: a time on the clock of `time.monotonic`; tasks unfinished by then are abandoned.
    """
    if num_processes == 0:
        outcomes: list[Outcome] = []
        for task in tasks:
            is_late = time.monotonic() > deadline
            outcomes.append(Outcome(None, OUT_OF_TIME) if is_late else _attempt(function, task))
        return outcomes
    pool = _WorkerPool(function)
    try:
        return pool.run(tasks, num_processes, deadline)
    finally:
        for process in pool.processes.values():
            process.kill()
            process.join()


def _attempt(function: Callable[[Any], Any], task: Any) -> Outcome:
    try:
        return Outcome(function(task), None)
    except Exception as error:
        first_line = (str(error).splitlines() or [""])[0]
        return Outcome(None, f"{type(error).__name__}: {first_line}"[:500])


def _work(function: Callable[[Any], Any], tasks: Connection) -> None:
    """The loop of a worker process, which ends at its first problem or when killed."""
    outcome: Outcome = Outcome(None, None)
    while outcome.problem is None:
        outcome = _attempt(function, tasks.recv())
        tasks.send(tuple(outcome))


class _WorkerPool:
    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function
        self.processes: dict[Connection, SpawnProcess] = {}

    def run(self, tasks: Sequence[Any], num_processes: int, deadline: float) -> list[Outcome]:
        outcomes: list[Outcome] = [Outcome(None, OUT_OF_TIME)] * len(tasks)
        waiting = deque(range(len(tasks)))
        idle: list[Connection] = []
        busy: dict[Connection, int] = {}
        while waiting or busy:
            while waiting and len(busy) < num_processes:
                worker = idle.pop() if idle else self._start()
                busy[worker] = waiting.popleft()
                worker.send(tasks[busy[worker]])
            ready = wait(list(busy), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for worker in [worker for worker in busy if worker in ready]:
                outcomes[busy.pop(worker)], is_alive = self._receive(worker)
                if is_alive:
                    idle.append(worker)
        return outcomes

    def _start(self) -> Connection:
        # Spawned rather than forked: a fork would inherit this process's state of the device.
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(target=_work, args=(self.function, there), daemon=True)
        process.start()
        # The worker now holds the only other end, so that its death reads as an end of file here.
        there.close()
        self.processes[here] = process
        return here

    def _receive(self, worker: Connection) -> tuple[Outcome, bool]:
        """The outcome of the worker's task, and whether the worker can take another."""
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
