"""The processes that measure one model together, each with a copy of it and a share of the work."""

import itertools
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, resource_tracker
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from longhaul.pipeline.terminal.progress import TokenProgress

T = TypeVar("T")
P = ParamSpec("P")
_NOTHING = object()
# The first alone does some of the work, and the others wait.
_PATIENCE = timedelta(days=1)
_SECONDS_TO_FAIL = 3.0


@dataclass(frozen=True)
class Ranks:
    """One process alone, or this one of several that talk through a group of CPUs' backend."""

    index: int = 0
    count: int = 1
    group: Any = None

    @property
    def is_first(self) -> bool:
        return self.index == 0

    def share(self, work: Iterable[T]) -> Iterator[T]:
        """Every count-th piece, from the one with this process's index on."""
        return itertools.islice(work, self.index, None, self.count)

    def gather(self, found: list[T]) -> list[T]:
        """What all of them found of their shares, in the order of the work."""
        if self.count == 1:
            return found
        of_all: list[list[T]] = [[] for _ in range(self.count)]
        dist.all_gather_object(of_all, found, group=self.group)
        rows = itertools.zip_longest(*of_all, fillvalue=_NOTHING)
        return [one for row in rows for one in row if one is not _NOTHING]  # type: ignore[misc]

    def progress(self, total: int, what: str) -> TokenProgress:
        """Shown by the first process alone, which takes the others to be as fast as it is."""
        progress = TokenProgress(total, what, times=self.count if self.is_first else 0)
        progress.show(0)
        return progress


ALONE = Ranks()


def measure_together(
    count: int, measure: Callable[Concatenate[Ranks, P], None], *args: P.args, **kwargs: P.kwargs
) -> None:
    """Call measure(ranks, ...) in this process and count - 1 others, one device each.

    Where another process fails, this one ends with status 1; bad input, which all find alike, is
    left to this one to tell.
    """
    if count == 1:
        measure(ALONE, *args, **kwargs)
        return
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as meeting_place:
        others = [
            spawn.Process(
                target=_follow,
                args=(measure, rank, count, meeting_place, args, kwargs),
            )
            for rank in range(1, count)
        ]
        has_failed = threading.Event()
        interrupts: list[int] = []

        def interrupt(number: int, frame: object) -> None:
            # Python drops what is raised within a destructor. Then this process goes on until it,
            # or its watch, misses the others.
            interrupts.append(number)
            _terminate(others)
            raise KeyboardInterrupt

        # Started first, since its start would unblock the interrupt.
        resource_tracker.ensure_running()
        before = signal.signal(signal.SIGINT, interrupt)
        try:
            # They leave Ctrl-C to this process, which ends them, and print no tracebacks of theirs.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            for process in others:
                process.start()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            threading.Thread(
                target=_watch, args=(others, has_failed, interrupts), daemon=True
            ).start()
            _join(measure, 0, count, meeting_place, args, kwargs)
        except BaseException:
            has_failed.set()
            _terminate(others)
            if interrupts:
                raise KeyboardInterrupt from None
            raise
        finally:
            signal.signal(signal.SIGINT, before)


def _terminate(processes: Sequence[Any]) -> None:
    for process in processes:
        if process.pid is not None:
            process.terminate()


def _join(
    measure: Callable[..., None], rank: int, count: int, meeting_place: str, args: Any, kwargs: Any
) -> None:
    """Measure together with the others, who are found by a file of this folder."""
    has_gpus = torch.cuda.is_available()
    if has_gpus:
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // count))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if has_gpus else "gloo",
        init_method=f"file://{meeting_place}/ranks",
        rank=rank,
        world_size=count,
        timeout=_PATIENCE,
    )
    group = dist.new_group(backend="gloo", timeout=_PATIENCE)
    measure(Ranks(rank, count, group), *args, **kwargs)
    # One that leaves earlier closes connections in which others still are.
    dist.barrier(group)
    dist.destroy_process_group()


def _follow(
    measure: Callable[..., None], rank: int, count: int, meeting_place: str, args: Any, kwargs: Any
) -> None:
    """What the other processes do."""
    try:
        _join(measure, rank, count, meeting_place, args, kwargs)
    except ValueError:
        os._exit(2)
    except (OSError, RuntimeError) as error:
        print(f"longhaul: rank {rank}: {' '.join(str(error).split())}", file=sys.stderr)
        os._exit(1)


def _watch(others: Sequence[Any], has_failed: threading.Event, interrupts: Sequence[int]) -> None:
    """End all processes when one of the others has failed: this one would wait for it."""
    running = {process.sentinel: process for process in others}
    while running:
        for sentinel in connection.wait(list(running)):
            process = running.pop(sentinel)
            process.join()
            # Where this process fails, the others do too, of what it leaves undone.
            if process.exitcode not in (0, 2) and not has_failed.wait(_SECONDS_TO_FAIL):
                rank = others.index(process) + 1
                line = f"rank {rank} ended with status {process.exitcode}, wanted 0"
                os.write(2, f"longhaul: {'interrupted' if interrupts else line}\n".encode())
                _terminate(others)
                os._exit(130 if interrupts else 1)
