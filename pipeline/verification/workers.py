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
    waiting = deque(range(len(jobs)))
    idle: list[_Worker] = []
    busy: dict[Connection, _Worker] = {}
    try:
        while (waiting or busy) and time.monotonic() < deadline:
            running = [worker.number for worker in busy.values()]
            starting = _admitted(jobs, waiting, running, num_processes, gigabytes)
            if starting:
                began(starting)
            for number in starting:
                worker = idle.pop() if idle else _Worker()
                worker.begin(number, jobs[number])
                busy[worker.connection] = worker
            soonest = min([deadline, *(worker.until for worker in busy.values())])
            ready = wait(list(busy), timeout=max(0.0, soonest - time.monotonic()))
            for connection, worker in list(busy.items()):
                if connection in ready:
                    status, result = worker.receive()
                elif worker.until <= time.monotonic() < deadline:
                    limit = jobs[worker.number].seconds
                    status, result = "timed out", f"took longer than {limit:g} s"
                else:
                    continue
                del busy[connection]
                if status == "returned":
                    idle.append(worker)
                else:
                    worker.kill()
                outcome = Outcome(status, result, time.monotonic() - worker.since)
                ended(worker.number, outcome)
    finally:
        for worker in [*idle, *busy.values()]:
            worker.kill()


def _admitted(
    jobs: Sequence[Job],
    waiting: deque[int],
    running: Sequence[int],
    num_processes: int,
    gigabytes: float,
) -> list[int]:
    """The next jobs that may begin, taken from those that wait."""
    taken: list[int] = []
    used = sum(jobs[number].gigabytes for number in running)
    while waiting and len(running) + len(taken) < num_processes:
        needed = jobs[waiting[0]].gigabytes
        if (running or taken) and used + needed > gigabytes:
            break
        used += needed
        taken.append(waiting.popleft())
    return taken


class _Worker:
    """A process that runs one job after the other."""

    def __init__(self) -> None:
        # Spawned rather than forked: a fork would inherit this process's state of the device.
        context = multiprocessing.get_context("spawn")
        self.connection, there = context.Pipe()
        self.process = context.Process(target=_work, args=(there,), daemon=False)
        self.process.start()
        # The worker now holds the only other end, so that its death reads as an end of file here.
        there.close()

    def begin(self, number: int, job: Job) -> None:
        self.number, self.since = number, time.monotonic()
        self.until = self.since + job.seconds
        with suppress(OSError):  # It died while it was idle, which shows when it is read.
            self.connection.send((job.function, job.arguments))

    def receive(self) -> tuple[Any, Any]:
        """What it says of its job: the status, and the result or the problem."""
        try:
            status, result = self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            return "crashed", f"its process {_ended_how(self.process.exitcode)}"
        return status, result

    def kill(self) -> None:
        """End it with all processes that it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        self.connection.close()


def _ended_how(code: int | None) -> str:
    if code is not None and code < 0:
        with suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit status {code}"


def _work(jobs: Connection) -> None:
    """The loop of a worker, in a session of its own; it ends with the process that started it."""
    os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()
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


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)
