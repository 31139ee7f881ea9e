"""Run jobs in processes of their own, so that a crash, a hang or a broken device ends one only."""

import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, Literal, NamedTuple

_LONGEST_PROBLEM = 2000  # characters


@dataclass(frozen=True)
class Job:
    """A call of a function that can be imported by name, and its time limit."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    seconds: float
    gigabytes: float = 0.0  # of the memory that all processes share


class Outcome(NamedTuple):
    """What became of a job."""

    status: Literal["returned", "raised", "crashed", "timed out"]
    result: Any  # of a job that returned; of any other a line that says what went wrong
    seconds: float


def run_jobs(
    jobs: Sequence[Job],
    *,
    num_processes: int,
    gigabytes: float = float("inf"),
    deadline: float,
    began: Callable[[list[int]], None] = lambda numbers: None,
    ended: Callable[[int, Outcome], None],
) -> None:
    """Run jobs in the given order. What happens to one does not stop the others.

    A process runs one job after the other. After an exception it ends, since its device may be
    broken, and after its limit it is killed with all processes that it started: a new one follows.

    Args:
        num_processes: how many jobs run at a time.
        gigabytes: jobs wait until this much is enough for all that run. A job that needs more than
            all of it runs alone.
        deadline: on the clock of time.monotonic. Jobs unfinished by then are killed; nothing more
            is told of them.
        began: is told the numbers of jobs that are about to begin.
        ended: is told a job's number and outcome.
    """
    pool = _Pool(num_processes, gigabytes)
    try:
        pool.run(jobs, deadline, began, ended)
    finally:
        for worker in list(pool.processes):
            pool.kill(worker)


class _Running(NamedTuple):
    number: int
    since: float
    until: float


class _Pool:
    def __init__(self, num_processes: int, gigabytes: float) -> None:
        self.num_processes = num_processes
        self.gigabytes = gigabytes
        self.processes: dict[Connection, tuple[SpawnProcess, Connection]] = {}

    def run(
        self,
        jobs: Sequence[Job],
        deadline: float,
        began: Callable[[list[int]], None],
        ended: Callable[[int, Outcome], None],
    ) -> None:
        waiting = deque(range(len(jobs)))
        idle: list[Connection] = []
        busy: dict[Connection, _Running] = {}
        while (waiting or busy) and time.monotonic() < deadline:
            starting = self._admitted(jobs, waiting, [one.number for one in busy.values()])
            if starting:
                began(starting)
            for number in starting:
                worker = idle.pop() if idle else self._start()
                now = time.monotonic()
                busy[worker] = _Running(number, now, now + jobs[number].seconds)
                with suppress(OSError):  # It died while it was idle, which shows when it is read.
                    worker.send((jobs[number].function, jobs[number].arguments))
            soonest = min([deadline, *(one.until for one in busy.values())])
            ready = wait(list(busy), timeout=max(0.0, soonest - time.monotonic()))
            for worker in [one for one in busy if one in ready]:
                running = busy.pop(worker)
                status, result = self._receive(worker)
                if status == "returned":
                    idle.append(worker)
                ended(running.number, Outcome(status, result, time.monotonic() - running.since))
            now = time.monotonic()
            for worker in [one for one in busy if busy[one].until <= now < deadline]:
                running = busy.pop(worker)
                self.kill(worker)
                limit = f"took longer than {jobs[running.number].seconds:g} s"
                ended(running.number, Outcome("timed out", limit, now - running.since))

    def _admitted(self, jobs: Sequence[Job], waiting: deque[int], busy: list[int]) -> list[int]:
        """The next jobs that may begin, taken from those that wait."""
        taken: list[int] = []
        used = sum(jobs[number].gigabytes for number in busy)
        while waiting and len(busy) + len(taken) < self.num_processes:
            needed = jobs[waiting[0]].gigabytes
            if (busy or taken) and used + needed > self.gigabytes:
                break
            used += needed
            taken.append(waiting.popleft())
        return taken

    def _start(self) -> Connection:
        # Spawned rather than forked: a fork would inherit this process's state of the device.
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        lifeline, end = context.Pipe()
        process = context.Process(target=_work, args=(there, end), daemon=False)
        process.start()
        # The worker now holds the only other end, so that its death reads as an end of file here.
        there.close()
        end.close()
        self.processes[here] = process, lifeline
        return here

    def _receive(self, worker: Connection) -> tuple[Any, Any]:
        """What a worker says of its job. It is no longer used unless the job returned."""
        try:
            status, result = worker.recv()
        except (EOFError, OSError):
            process, _ = self.processes[worker]
            process.join()
            status, result = "crashed", f"its process {_ended_how(process.exitcode)}"
        if status != "returned":
            self.kill(worker)
        return status, result

    def kill(self, worker: Connection) -> None:
        """End a worker with all processes that it started."""
        process, lifeline = self.processes.pop(worker)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.kill()
        process.join()
        worker.close()
        lifeline.close()


def _ended_how(code: int | None) -> str:
    if code is not None and code < 0:
        with suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit status {code}"


def _work(jobs: Connection, lifeline: Connection) -> None:
    """The loop of a worker, in a session of its own; it ends with the process that started it."""
    os.setsid()
    threading.Thread(target=_end_with_parent, args=(lifeline,), daemon=True).start()
    while True:
        try:
            function, arguments = jobs.recv()
        except EOFError:
            return
        try:
            answer = "returned", function(*arguments)
        except Exception as error:
            text = f"{type(error).__name__}: {error}".strip()
            answer = "raised", text[:_LONGEST_PROBLEM]
        jobs.send(answer)
        if answer[0] != "returned":
            return


def _end_with_parent(lifeline: Connection) -> None:
    with suppress(OSError):
        lifeline.poll(None)
    os.killpg(0, signal.SIGKILL)
