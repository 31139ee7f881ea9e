"""Writes a run's metrics journal, logs/metrics.jsonl: JSON lines, appended and never rewritten.

The journal is the authoritative record, which mlflow_mirror.py uploads to MLflow. Evaluations write
a journal of their own, logs/evaluation.jsonl. There are two sorts of lines, metrics with a step and
events with a number. Both increase within each "kind" of line:

    {"kind": "train", "step": 20, "time_ms": 1790000000000, "values": {"loss": 2.5}}
    {"kind": "status", "number": 1, "time_ms": 1790000000000, "status": "RUNNING"}

Steps are counted by training, which may repeat some after a restart: a step that a kind already has
is not written again. The numbers of events are assigned here. Values that JSON cannot represent are
the strings "NaN", "Infinity" and "-Infinity", which float() reads back.
"""

import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from longhaul.datamodules.files.atomic import write_atomically
from longhaul.datamodules.files.locks import lock
from longhaul.datamodules.files.untrusted import (
    Count,
    InnerPath,
    open_regular,
    open_to_write,
    parse_json,
)
from longhaul.pipeline.system.waiting import LOCK_AGAIN_S, POLL_S

logger = logging.getLogger(__name__)

_READ_BYTES = 4 << 20
EXIT_BUSY = 73
"""Exit status if another process is writing the journal: the run itself has not failed."""

_Number = float | Literal["NaN", "Infinity", "-Infinity"]
_Values = dict[str, _Number]
_Part = tuple[list[dict[str, Any]], int]


@dataclass(frozen=True)
class _Line:
    # It becomes part of MLflow tag names.
    kind: Annotated[str, Field(pattern="^[a-z_]+$", max_length=100)]
    time_ms: Count


@dataclass(frozen=True)
class _Metrics(_Line):
    step: Count
    values: _Values


@dataclass(frozen=True)
class _Event(_Line):
    number: Count


@dataclass(frozen=True)
class _Status(_Event):
    status: Literal["RUNNING", "SCHEDULED", "FINISHED", "FAILED", "KILLED"]


@dataclass(frozen=True)
class _Texts(_Event):
    values: dict[str, str]


@dataclass(frozen=True)
class Dataset:
    """A set of shards as MLflow's page of a run shows it."""

    name: str
    digest: str
    """Beginning of the hash of all shards' hashes."""

    source_type: str
    source: str
    """JSON with the location."""

    profile: str
    """JSON with sizes."""

    context: str
    """What it was read for: training or validation."""


@dataclass(frozen=True)
class _Datasets(_Event):
    datasets: list[Dataset]


@dataclass(frozen=True)
class _Artifact(_Event):
    path: InnerPath
    folder: str | None  # checked by MLflow


@dataclass(frozen=True)
class _Checkpoint(_Event):
    path: InnerPath
    step: Count
    values: _Values


# Other kinds of events are passed on, and uploaded by nothing.
_EVENTS = {
    "status": _Status,
    "params": _Texts,
    "tags": _Texts,
    "datasets": _Datasets,
    "artifact": _Artifact,
    "checkpoint": _Checkpoint,
}


class JournalError(OSError):
    """A journal that cannot be opened or written; the message is one line for the user."""


class JournalBusyError(JournalError):
    """Another process is writing the journal, so it is training the run."""


class Journal:
    """Appends to one journal file, which one process at a time can open. Threads may share it."""

    def __init__(self, path: Path) -> None:
        """Open or create the journal, and cut off a last line that a crash left incomplete.

        Raises:
            JournalError: the file cannot be written, or another process is writing it.
        """
        self.path = path
        self._lock = threading.Lock()
        self._last: dict[str, dict[str, Any]] = {}
        self._is_away = False  # and this was told
        self._lock_path = path.with_name(f"{path.name}.lock")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # A requeued job waits for the lock, other processes do not.
            seconds = LOCK_AGAIN_S if "SLURM_RESTART_COUNT" in os.environ else 0.0
            self._lock_handle = _lock_file(self._lock_path, seconds)
            self._file = open_to_write(path, os.O_RDWR | os.O_APPEND)
            complete = 0
            for lines, end in parts(self.read):
                self._last.update((line["kind"], line) for line in lines)
                complete = end
            if complete != os.fstat(self._file).st_size:
                os.ftruncate(self._file, complete)
        except JournalError:
            raise
        except OSError as error:
            raise JournalError(f"{path} cannot be opened: {error.strerror or error}") from error

    def append(self, kind: str, step: int, values: Mapping[str, float]) -> bool:
        """Record the values of a step. False if the kind already has this step or a later one."""
        with self._lock:
            last = self._last.get(kind)
            if last is not None and step <= position(last):
                return False
            numbers = plain_values(values)
            self._write({"kind": kind, "step": step, "time_ms": _now_ms(), "values": numbers})
            return True

    def add(self, kind: str, **fields: Any) -> int:
        """Record an event, and return its number within the kind, counted from 1."""
        with self._lock:
            last = self._last.get(kind)
            number = 1 if last is None else position(last) + 1
            self._write({"kind": kind, "number": number, "time_ms": _now_ms(), **fields})
            return number

    def last(self, kind: str) -> dict[str, Any] | None:
        """The last line of a kind, None if there is none."""
        return self._last.get(kind)

    def sync(self) -> None:
        """Flush everything written so far to disk.

        Called before a checkpoint gets its final name and before lines are uploaded, so that a
        crash cannot lose a step that a checkpoint contains or that MLflow already has. A journal
        that someone has removed or replaced is written again.

        Raises:
            JournalError: it cannot be flushed; or its lock was removed, and another process has it.
        """
        with self._lock:
            if self._file < 0:
                return
            self._put_back()
            handle = self._dup()
        # Outside the lock, so that `append` does not wait for the disk.
        try:
            os.fsync(handle)
        except OSError as error:
            raise self._unwritten(error) from error
        finally:
            os.close(handle)

    def read(self, offset: int = 0) -> _Part:
        """As `read_lines`, but of the file that this process writes, whatever has its name."""
        with self._lock:
            handle = self._dup()
        try:
            return _read_lines(handle, self.path, offset)
        finally:
            os.close(handle)

    def close(self) -> None:
        """Flush and close the journal, and release its lock."""
        try:
            self.sync()
        finally:
            with self._lock:
                if self._file >= 0:
                    os.close(self._file)
                    os.close(self._lock_handle)
                    self._file = -1

    def _dup(self) -> int:
        if self._file < 0:
            raise JournalError(f"{self.path} is closed")
        return os.dup(self._file)

    def _put_back(self) -> None:
        """Take the lock again, and write the journal again, if either is not where it was."""
        if not _is_at(self._lock_path, self._lock_handle):
            try:
                held, self._lock_handle = self._lock_handle, _lock_file(self._lock_path, 0.0)
                os.close(held)
            except JournalBusyError:
                raise
            except OSError as error:  # a folder has its name, say
                logger.debug("%s cannot be locked again: %s", self._lock_path, error)
        if _is_at(self.path, self._file):
            return
        try:
            size = os.fstat(self._file).st_size
            content = os.pread(self._file, size, 0)
            if len(content) < size:
                raise OSError(f"found {len(content)} of {size} bytes")
            write_atomically(self.path, content)
            handle = open_to_write(self.path, os.O_RDWR | os.O_APPEND)
        except OSError as error:
            if not self._is_away:
                logger.warning("%s was removed or replaced; %s", self.path, error)
            self._is_away = True
        else:
            # Under the same number, which another thread may be using.
            os.dup2(handle, self._file, inheritable=False)
            os.close(handle)
            logger.warning("%s was removed or replaced; it is written again", self.path)

    def _unwritten(self, error: OSError) -> JournalError:
        return JournalError(f"{self.path} cannot be written: {error.strerror or error}")

    def _write(self, line: dict[str, Any]) -> None:
        if self._file < 0:
            raise JournalError(f"{self.path} is closed")
        content = json.dumps(line, allow_nan=False).encode() + b"\n"
        parse_line(content)  # what no reader would take must not be written either
        size = os.fstat(self._file).st_size
        try:
            written = 0
            while written < len(content):  # a disk that becomes full takes a part first
                written += os.write(self._file, content[written:])
        except OSError as error:
            # Remove what was written of the line, or the next one would be appended to it.
            os.ftruncate(self._file, size)
            raise self._unwritten(error) from error
        self._last[line["kind"]] = line


def parsed_positions(text: str) -> dict[str, int]:
    """The positions in a tag. Nothing if someone has changed it: all lines are then sent again."""
    try:
        return parse_json(dict[str, int], text, "positions")
    except ValueError:
        return {}


def position(line: Mapping[str, Any]) -> int:
    """A line's step or number, by which the lines of a kind are ordered."""
    return int(line["number"] if "number" in line else line["step"])


def read_lines(path: Path, offset: int = 0) -> _Part:
    """Read some complete lines from a byte offset on, and return them with the offset after them.

    The returned offset equals the given one if there are no more lines. An incomplete last line is
    left for the next call. A line in the middle that is not valid JSON was damaged by the disk: it
    is skipped with a warning, since the rest is still good.
    """
    with open_regular(path) as file:
        return _read_lines(file.fileno(), path, offset)


def parts(read: Callable[[int], _Part], offset: int = 0) -> Iterator[_Part]:
    """All further lines in parts, and the offset after each; `read` is as `read_lines`."""
    while True:
        lines, end = read(offset)
        if end == offset:
            return
        yield lines, end
        offset = end


def last_status(path: Path) -> str | None:
    """The newest status in a journal, None if there is none that can be read."""
    status = None
    with suppress(OSError, ValueError):
        for lines, _ in parts(partial(read_lines, path)):
            for line in lines:
                status = line["status"] if line["kind"] == "status" else status
    return status


def _read_lines(handle: int, path: Path, offset: int) -> _Part:
    # Not all at once: a long run's journal has tens of megabytes, and several times that when
    # parsed.
    content = os.pread(handle, _READ_BYTES, offset)
    while content and b"\n" not in content:
        more = os.pread(handle, _READ_BYTES, offset + len(content))
        if not more:
            break
        content += more
    end = content.rfind(b"\n") + 1
    return list(_parse(content[:end], path)), offset + end


def _parse(content: bytes, path: Path) -> Iterator[dict[str, Any]]:
    for raw in content.splitlines():
        try:
            yield parse_line(raw)
        except ValueError:
            logger.warning("%s holds a damaged line, which is skipped: %.80r", path, raw)


def parse_line(raw: bytes) -> dict[str, Any]:
    """The line that these bytes are. Raises ValueError if it is damaged."""
    line = parse_json(dict[str, Any], raw, "a line")
    schema: Any = _Metrics
    if "number" in line:
        schema = _EVENTS.get(str(line.get("kind")), _Event)
    parse_json(schema, raw, "a line")
    return line


def plain_values(values: Mapping[str, float]) -> dict[str, float | str]:
    """Numbers as a line represents them. float() reads each back exactly."""
    numbers = {name: float(value) for name, value in values.items()}
    # json.dumps writes the others as NaN, Infinity and -Infinity, which are JSON in quotes only.
    return {name: n if math.isfinite(n) else json.dumps(n) for name, n in numbers.items()}


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _lock_file(path: Path, seconds: float) -> int:
    """Lock a file until its handle, which is returned, is closed or the process ends.

    It is not the journal itself, which this process also opens to read: closing that would release
    the lock. Another process that has it is waited for so many seconds.
    """
    handle = open_to_write(path, os.O_RDWR)
    deadline = time.monotonic() + seconds
    has_warned = False
    while True:
        try:
            if lock(handle):
                break
        except OSError as error:
            # Some network file systems have no locks. Without one, the journal is still correct as
            # long as only one process writes it.
            logger.warning("%s cannot be locked: %s", path, error.strerror)
            return handle
        holder = os.pread(handle, 200, 0).decode(errors="replace").strip()
        message = f"{path.with_suffix('')} is being written by another process ({holder})"
        if time.monotonic() >= deadline:
            os.close(handle)
            raise JournalBusyError(message)
        if not has_warned:
            logger.warning("%s; waiting for %.0f s at most", message, seconds)
            has_warned = True
        time.sleep(POLL_S)
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"pid {os.getpid()} on {os.uname().nodename}\n".encode(), 0)
    return handle


def _is_at(path: Path, handle: int) -> bool:
    """Whether a path is still that of an open file."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(handle))
    except OSError:
        return False
