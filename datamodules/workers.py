"""Processes that read windows ahead: from what they start, when they end, how long they may take.

They are forked from a fork server: a process of its own, which has imported torch and has no
threads. The training process has threads, and a process forked from it may inherit a lock that one
of them held. In Python 3.11 such a lock of the interpreter makes the new process hang for ever.
"""

import atexit
import gc
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from logging.handlers import QueueHandler
from multiprocessing import (
    active_children,
    connection,
    forkserver,
    parent_process,
    resource_tracker,
)
from queue import SimpleQueue
from types import ModuleType
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from longhaul.datamodules.stream import TokenWindows, Windows

_PREFETCH_BATCHES = 4
# Until a worker begins, which takes a moment, or several seconds while the fork server imports.
_SECONDS_TO_BEGIN = 120.0
# Until a worker has read its first batch: it may hash many shards on a slow disk before. To fetch
# remote shards may take any time; trainer.hang_seconds bounds that.
_SECONDS_TO_READ = 600.0
# Signals to all processes of a job step or a terminal. The training process reacts to them.
_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
# What a worker has come to.
_BEGUN, _HAS_READ = 1, 2


def start_fork_server() -> None:
    """Start the process that workers are forked from, unless it runs. It imports torch by itself.

    Raises:
        RuntimeError: if the path of the temporary folder is too long for a socket.
    """
    forkserver.set_forkserver_preload([__name__])
    try:
        with _fork_servers_environment(), _blocked_signals():
            resource_tracker.ensure_running()
            # The line above has unblocked two of them.
            signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
            forkserver.ensure_running()
    except OSError as error:
        raise RuntimeError(
            f"the process that data workers are forked from: {error}; TMPDIR is "
            f"{tempfile.gettempdir()}, and the path of a socket in it has at most 107 bytes"
        ) from error


Read = tuple[Windows, list[logging.LogRecord]]
"""What a worker sends: windows, and what was logged meanwhile, for the trainer's handlers."""


class WorkerLoader(DataLoader[Windows]):
    """Windows in order, read ahead by worker processes.

    Raises:
        RuntimeError: while iterating, if a worker has not begun or has not read its first batch in
            time.
    """

    def __init__(
        self,
        dataset: TokenWindows,
        batches: Sampler[Sequence[int]],
        workers: int,
        location: str,
        *,
        is_remote: bool = False,
    ) -> None:
        """`location` is that of the corpus, for error messages."""
        # In shared memory: each worker sets its own entry.
        self._stages = torch.zeros(workers, dtype=torch.uint8).share_memory_()
        self._location = location
        self._is_remote = is_remote
        super().__init__(
            cast(Dataset[Windows], _Reader(dataset, self._stages)),
            # torch's annotation demands lists, but it passes on whatever the sampler yields.
            batch_sampler=cast(Sampler[list[int]], batches),
            collate_fn=unchanged,
            # A loader draws a seed for its workers, which use none. With torch's own generator, a
            # resumed run, which makes one more loader, would not have the state of one that was
            # not stopped.
            generator=torch.Generator(),
            num_workers=workers,
            persistent_workers=True,
            prefetch_factor=_PREFETCH_BATCHES,
            multiprocessing_context="forkserver",
            worker_init_fn=partial(_begin, self._stages, dict(os.environ)),
        )

    def __iter__(self) -> Iterator[Windows]:  # type: ignore[override]
        for windows, records in cast(Iterator[Read], super().__iter__()):
            for record in records:
                logging.getLogger(record.name).handle(record)
            yield windows

    def kill_workers(self) -> None:
        """End the workers at once, also those that are stopped or do not answer."""
        for worker in getattr(self._iterator, "_workers", ()):
            worker.kill()

    def _get_iterator(self) -> Any:
        start_fork_server()
        server = cast(Any, forkserver)._forkserver._forkserver_pid
        # Process.start() waits without limit for the server's answer, unless the server has ended.
        killer = threading.Timer(_SECONDS_TO_BEGIN, os.kill, (server, signal.SIGKILL))
        killer.daemon = True
        killer.start()
        began = time.monotonic()
        try:
            with _without_main():
                self._iterator = super()._get_iterator()
        except (EOFError, ConnectionError):
            raise RuntimeError(
                f"the process that data workers are forked from (process {server}): ended or did "
                f"not answer within {time.monotonic() - began:.0f} s, wanted workers; see whether "
                "this machine is short of memory, and whether the disk with Python's packages "
                "answers; data.workers=0 reads in the training process"
            ) from None
        finally:
            killer.cancel()
        self._wait_for_first_batches(self._iterator)
        return self._iterator

    def _wait_for_first_batches(self, iterator: Any) -> None:
        """Until each worker has read its first batch, or has ended."""
        # With fewer batches than workers, some have nothing to read.
        busy = min(self.num_workers, iterator._send_idx)
        sentinels = [worker.sentinel for worker in iterator._workers]
        waited, ticked = 0.0, time.monotonic()
        while not bool((self._stages[:busy] == _HAS_READ).all()):
            # The iterator says which worker has ended.
            if connection.wait(sentinels, timeout=0.002):
                return
            # A turn that takes longer was stopped, with this process and perhaps with the workers.
            waited, ticked = waited + min(time.monotonic() - ticked, 1.0), time.monotonic()
            for number, stage in enumerate(self._stages[:busy].tolist()):
                worker = f"data worker {number} (process {iterator._workers[number].pid})"
                if stage < _BEGUN and waited > _SECONDS_TO_BEGIN:
                    self.kill_workers()
                    raise RuntimeError(
                        f"{worker}: not begun {waited:.0f} s after its start, wanted a moment; see "
                        "whether this machine is short of memory or processors"
                    )
                is_slow = stage < _HAS_READ and waited > _SECONDS_TO_READ
                if is_slow and not self._is_remote:
                    self.kill_workers()
                    raise RuntimeError(
                        f"{worker}: no batch {waited:.0f} s after its start, wanted the first; see "
                        f"whether the disk of {self._location} answers"
                    )


class _Reader(Dataset[Read]):
    """A dataset in a worker, which notes there that it has read, and collects what is logged."""

    def __init__(self, windows: TokenWindows, stage: torch.Tensor) -> None:
        self._windows = windows
        self._stages = stage
        self._records: SimpleQueue[logging.LogRecord] | None = None

    def __getitems__(self, indices: Sequence[int]) -> Read:
        if self._records is None:
            self._records = SimpleQueue()
            # Arguments and tracebacks may not be pickled: this handler makes them text.
            logging.getLogger().handlers[:] = [QueueHandler(self._records)]
        try:
            windows = self._windows.__getitems__(indices)
        finally:
            worker = torch.utils.data.get_worker_info()
            assert worker is not None
            self._stages[worker.id] = _HAS_READ
        return windows, [self._records.get() for _ in range(self._records.qsize())]


def _begin(stage: torch.Tensor, environment: dict[str, str], worker: int) -> None:
    """What a worker does first."""
    # Else the garbage collector would write to, and so copy, the memory of the server's imports.
    gc.freeze()
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    threading.Thread(target=_end_with_trainer, daemon=True).start()
    # As the training process has it, not as the fork server was started with.
    os.environ.clear()
    os.environ.update(environment)
    stage[worker] = _BEGUN


def _end_with_trainer() -> None:
    # torch's workers watch the process that forked them, which is the fork server. That ends when
    # all have ended that may ask it for processes, and workers may.
    trainer = parent_process()
    assert trainer is not None
    connection.wait([trainer.sentinel])
    os._exit(0)


def unchanged(batch: Any) -> Any:
    return batch


@contextmanager
def _without_main() -> Iterator[None]:
    """What is started in the context does not import the script again that this process runs."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextmanager
def _blocked_signals() -> Iterator[None]:
    """What is started in the context inherits the blocked signals."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _fork_servers_environment() -> Iterator[None]:
    warnings = os.environ.get("PYTHONWARNINGS")
    # Semaphores of a killed training process are removed, and a user need not hear of it.
    silent = ",".join(filter(None, [warnings, "ignore:resource_tracker"]))
    # The server is started with `python -c`, and would import from the current folder. numpy would
    # start threads for products of matrices, which no worker computes.
    changes = {"PYTHONSAFEPATH": "1", "PYTHONWARNINGS": silent, "OMP_NUM_THREADS": "1"}
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@atexit.register
def _kill_workers() -> None:
    # multiprocessing would send them SIGTERM, which they have blocked, and wait without limit.
    for process in active_children():
        if process.daemon:
            process.kill()
