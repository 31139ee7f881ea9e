"""Evaluation on several processes, each with a copy of the model and a share of the work."""

import itertools
import multiprocessing
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import resource_tracker
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, start_processes

from longhaul.datamodules.files.untrusted import one_line
from longhaul.pipeline.system.processes import end_with_parent
from longhaul.pipeline.system.waiting import EVALUATION_FAIL_S
from longhaul.pipeline.terminal.output import plain_terminal
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
    """Call measure(ranks, ...) in this process, or in `count` new ones with one device each.

    Raises:
        ValueError, OSError, RuntimeError: what the first process to fail has raised. The others
            have been ended.
    """
    if count == 1:
        measure(SINGLE_PROCESS, *args, **kwargs)
        return
    errors = multiprocessing.get_context("spawn").SimpleQueue()
    # Started before the signal is blocked, because starting the tracker would unblock it.
    resource_tracker.ensure_running()
    with tempfile.TemporaryDirectory() as rendezvous:
        # The new processes inherit the blocked signal: after Ctrl-C this one ends them, and none of
        # them prints a traceback.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        processes = start_processes(
            _measure, (count, rendezvous, errors, measure, args, kwargs), count, join=False
        )
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            while not processes.join(grace_period=EVALUATION_FAIL_S):
                pass
        except ProcessExitedException as error:
            raised = []
            while error.exit_code > 0 and not errors.empty():
                raised.append(errors.get())
            if raised:
                raise min(raised, key=lambda one: isinstance(one, RankFailedError)) from None
            raise RuntimeError(
                f"rank {error.error_index} ended with status {error.exit_code}, wanted 0"
            ) from None
        finally:
            for process in processes.processes:
                process.terminate()
                process.join()


def _measure(
    rank: int,
    count: int,
    rendezvous: str,
    errors: Any,
    measure: Callable[..., None],
    args: Any,
    kwargs: Any,
) -> None:
    """Main function of a process: connect to the others through a file, and call `measure`."""
    end_with_parent()
    if torch.cuda.is_available():
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
    with plain_terminal():
        try:
            measure(Ranks(rank, count, dist.group.WORLD), *args, **kwargs)
            # A process that leaves earlier would close connections that others still use.
            dist.barrier()
        except (ValueError, OSError, RuntimeError) as error:
            errors.put(error)
            sys.exit(1)
        finally:
            dist.destroy_process_group()
