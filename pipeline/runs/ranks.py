"""Evaluation on several processes, each with a copy of the model and a share of the work."""

import itertools
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, resource_tracker
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from longhaul.datamodules.files.untrusted import one_line
from longhaul.pipeline.system.waiting import EVALUATION_FAIL_S
from longhaul.pipeline.terminal.output import message, plain_terminal
from longhaul.pipeline.terminal.progress import TokenProgress

T = TypeVar("T")
P = ParamSpec("P")
_PADDING = object()
# Long, because the other processes wait while the first one does some of the work by itself.
_COLLECTIVE_TIMEOUT = timedelta(days=1)


class RankFailedError(RuntimeError):
    """Another process failed in the work that all share."""


@dataclass(frozen=True)
class _Failure:
    """What a process that failed gives the others in place of its results."""

    message: str


@dataclass(frozen=True)
class Ranks:
    """This process's rank among those that evaluate a model together, by default one process."""

    index: int = 0
    count: int = 1
    group: Any = None
    """gloo process group of all of them, None for one process."""

    @property
    def is_first(self) -> bool:
        return self.index == 0

    def share(self, work: Iterable[T]) -> Iterator[T]:
        """This process's share: every `count`-th item of the work, starting at item `index`."""
        return itertools.islice(work, self.index, None, self.count)

    def gather(self, results: list[T]) -> list[T]:
        """Gather the results of all processes' shares, in the order of the work.

        Raises:
            RankFailedError: within `together`, another process failed.
        """
        if self.count == 1:
            return results
        rows = itertools.zip_longest(*self._exchange(results), fillvalue=_PADDING)
        return [one for row in rows for one in row if one is not _PADDING]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Context of work that either all processes finish, or none.

        Where it raises an exception in one process, it raises RankFailedError in the others: in
        their next `gather`, or at the end. So none waits for a process that failed, and all have
        taken part in the same number of exchanges.
        """
        try:
            yield
        except RankFailedError:
            raise
        except Exception as error:
            self._exchange(_Failure(f"{type(error).__name__}: {one_line(error)}"))
            raise
        self._exchange([])

    def _exchange(self, own: Any) -> list[Any]:
        """What all processes give, in their order."""
        if self.count == 1:
            return [own]
        of_all: list[Any] = [None] * self.count
        dist.all_gather_object(of_all, own, group=self.group)
        failed = [
            f"rank {rank} failed: {one.message}"
            for rank, one in enumerate(of_all)
            if isinstance(one, _Failure)
        ]
        if failed and not isinstance(own, _Failure):
            raise RankFailedError("; ".join(failed))
        return of_all

    def progress(self, total: int, what: str) -> TokenProgress:
        """A progress display of the first process, which assumes that the others are as fast."""
        progress = TokenProgress(total, what, times=self.count if self.is_first else 0)
        progress.show(0)
        return progress


SINGLE_PROCESS = Ranks()


def measure_together(
    count: int, measure: Callable[Concatenate[Ranks, P], None], *args: P.args, **kwargs: P.kwargs
) -> None:
    """Call measure(ranks, ...) in this process and in count - 1 others, with one device each.

    If another process fails, this one ends with status 1. Bad input raises ValueError in all
    processes, and only this one reports it.
    """
    if count == 1:
        measure(SINGLE_PROCESS, *args, **kwargs)
        return
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as rendezvous:
        others = [
            spawn.Process(
                target=_run_in_child,
                args=(measure, rank, count, rendezvous, args, kwargs),
            )
            for rank in range(1, count)
        ]
        has_failed = threading.Event()
        interrupts: list[int] = []

        def interrupt(number: int, frame: object) -> None:
            # Python drops an exception that is raised inside a destructor. This process then goes
            # on until it, or its thread _watch, notices that the others have ended.
            interrupts.append(number)
            _terminate(others)
            raise KeyboardInterrupt

        # Started before the signal is blocked, because starting the tracker would unblock it.
        resource_tracker.ensure_running()
        before = signal.signal(signal.SIGINT, interrupt)
        try:
            # The other processes inherit the blocked signal: this process handles Ctrl-C and ends
            # them, so that they print no tracebacks.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            for process in others:
                process.start()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            watch = threading.Thread(
                target=_watch, args=(others, has_failed, interrupts), daemon=True
            )
            watch.start()
            _join(measure, 0, count, rendezvous, args, kwargs)
            # To close their connection, others open the file in `rendezvous`. Without its folder
            # they would look for it until a timeout of minutes.
            watch.join()
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
    measure: Callable[..., None], rank: int, count: int, rendezvous: str, args: Any, kwargs: Any
) -> None:
    """Connect to the other processes through a file in `rendezvous`, and call `measure`."""
    has_gpus = torch.cuda.is_available()
    if has_gpus:
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // count))
    # Not over NCCL: what is exchanged are results, in main memory.
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}/ranks",
        rank=rank,
        world_size=count,
        timeout=_COLLECTIVE_TIMEOUT,
    )
    try:
        measure(Ranks(rank, count, dist.group.WORLD), *args, **kwargs)
        # A process that leaves earlier would close connections that others still use.
        dist.barrier()
    finally:
        # After a failure too: this process may go on with another model.
        dist.destroy_process_group()


def _run_in_child(
    measure: Callable[..., None], rank: int, count: int, rendezvous: str, args: Any, kwargs: Any
) -> None:
    """Main function of the other processes."""
    with plain_terminal():
        try:
            _join(measure, rank, count, rendezvous, args, kwargs)
        except ValueError:
            os._exit(2)
        except (OSError, RuntimeError) as error:
            print(f"longhaul: rank {rank}: {message(error)}", file=sys.stderr)
            os._exit(1)


def _watch(others: Sequence[Any], has_failed: threading.Event, interrupts: Sequence[int]) -> None:
    """End all processes when another one has failed, because this one would wait for it."""
    running = {process.sentinel: process for process in others}
    while running:
        for sentinel in connection.wait(list(running)):
            process = running.pop(sentinel)
            process.join()
            # If this process failed first, the others fail as a consequence, and it reports the
            # cause.
            if process.exitcode not in (0, 2) and not has_failed.wait(EVALUATION_FAIL_S):
                rank = others.index(process) + 1
                line = f"rank {rank} ended with status {process.exitcode}, wanted 0"
                os.write(2, f"longhaul: {'interrupted' if interrupts else line}\n".encode())
                _terminate(others)
                os._exit(130 if interrupts else 1)
