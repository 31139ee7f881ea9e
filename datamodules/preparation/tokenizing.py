"""Tokenize units into unit files, by several processes that share nothing but their folder.

Workers are started anew and not forked: this process may have threads of libraries. A worker ends
with this process, also if that is killed, because it watches it.
"""

import logging
import os
import signal
import threading
from collections import deque
from collections.abc import Mapping
from logging.handlers import QueueHandler
from multiprocessing import connection, get_context, parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

from longhaul.datamodules.preparation.documents import Unit
from longhaul.datamodules.preparation.resumable import Progress, counting_on
from longhaul.datamodules.preparation.unit_files import ENDING, UnitForm, unit_sizes, write_unit

_SECONDS_TO_END = 5.0


def unit_path(folder: Path, key: str) -> Path:
    """The file of a unit."""
    return folder / f"{key}{ENDING}"


def tokenize_units(
    units: Mapping[str, Unit],
    folder: Path,
    form: UnitForm,
    *,
    workers: int,
    progress: Progress,
) -> None:
    """Write the unit files that `folder` lacks.

    Args:
        units: by key, in their order. Equal keys mean equal content, whatever the source is called.
        workers: processes that tokenize; 1 is this one.
        progress: called with the number of tokens in unit files so far.

    Raises:
        ValueError: a unit is damaged. It is the first damaged one of those begun, and the files of
            the others stay.
        RuntimeError: a worker was killed.
    """
    if workers < 1:
        raise ValueError(f"--workers: found {workers}, wanted 1 or more")
    missing = {key: unit for key, unit in units.items() if not unit_path(folder, key).exists()}
    done = sum(unit_sizes(unit_path(folder, key)).tokens for key in units.keys() - missing.keys())
    progress(done)
    if min(workers, len(missing)) <= 1:
        for key, unit in missing.items():
            show = counting_on(progress, done)
            done += write_unit(unit_path(folder, key), unit.documents(), form, show)
            progress(done)
        return
    crew = _Crew(min(workers, len(missing)), folder, form)
    try:
        crew.tokenize(missing, counting_on(progress, done))
    finally:
        crew.end()


class _Crew:
    """Worker processes, each at the other end of a pipe."""

    def __init__(self, workers: int, folder: Path, form: UnitForm) -> None:
        context = get_context("spawn")
        self._processes = {}
        for _ in range(workers):
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(there, folder, form), daemon=True)
            process.start()
            # Else reading from it would not end with the worker.
            there.close()
            self._processes[here] = process

    def tokenize(self, units: Mapping[str, Unit], progress: Progress) -> None:
        waiting = deque(enumerate(units.items()))
        busy: dict[Connection, int] = {}
        names = [unit.name for unit in units.values()]
        failed: dict[int, Exception] = {}
        finished = 0
        begun: dict[Connection, int] = {}  # tokens of the unit that a worker is at

        def hand_out(pipe: Connection) -> None:
            if waiting and not failed:
                busy[pipe], (key, unit) = waiting.popleft()
                pipe.send((key, unit))

        for pipe in self._processes:
            hand_out(pipe)
        # Units are handed out in order, so none that waits comes before one that failed.
        while busy and not (failed and min(failed) < min(busy.values())):
            for pipe in cast(list[Connection], connection.wait(list(busy))):
                try:
                    answer = pipe.recv()
                except (EOFError, ConnectionResetError):
                    process = self._processes[pipe]
                    process.join(_SECONDS_TO_END)
                    number = busy.pop(pipe)
                    failed[number] = RuntimeError(
                        f"{names[number]}: the process that tokenized it ended with status "
                        f"{process.exitcode}; fewer --workers need less memory"
                    )
                    continue
                if isinstance(answer, logging.LogRecord):
                    logging.getLogger(answer.name).handle(answer)
                elif isinstance(answer, Exception):
                    failed[busy.pop(pipe)] = answer
                else:
                    tokens, is_done = answer
                    begun[pipe] = tokens
                    if is_done:
                        finished += begun.pop(pipe)
                        del busy[pipe]
                        hand_out(pipe)
                    progress(finished + sum(begun.values()))
        if failed:
            raise failed[min(failed)]

    def end(self) -> None:
        for pipe, process in self._processes.items():
            pipe.close()
            process.terminate()
        for process in self._processes.values():
            process.join(_SECONDS_TO_END)


class _PipeHandler(QueueHandler):
    """Sends log records, as plain text, to the process that started this one."""

    def enqueue(self, record: logging.LogRecord) -> None:
        self.queue.send(record)  # type: ignore[attr-defined]


def _work(pipe: Connection, folder: Path, form: UnitForm) -> None:
    """What a worker does: it tokenizes the units that it is sent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a text at a time has no use for threads
    threading.Thread(target=_end_with_parent, daemon=True).start()
    logging.getLogger().addHandler(_PipeHandler(pipe))  # type: ignore[arg-type]
    while True:
        try:
            key, unit = pipe.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            tokens = write_unit(
                unit_path(folder, key),
                unit.documents(),
                form,
                lambda tokens: pipe.send((tokens, False)),
            )
            answer: Any = (tokens, True)
        except OSError as error:
            where = str(error.filename or folder)
            answer = OSError(error.errno, error.strerror, where) if error.errno else error
        except ValueError as error:
            answer = ValueError(str(error))
        pipe.send(answer)


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None, "a worker has a parent"
    parent.join()
    os._exit(1)
