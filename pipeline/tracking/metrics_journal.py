"""The local record of a run: one JSON object a line, appended, never rewritten.

The journal is the truth; MLflow shows a copy of it. Two sorts of lines, each numbered upwards
within its kind:

    {"kind": "train", "step": 20, "time_ms": 1790000000000, "values": {"loss": 2.5}}
    {"kind": "status", "number": 1, "time_ms": 1790000000000, "status": "RUNNING"}

Steps belong to training, which may repeat some after a restart: a step that a kind already has is
not written again. Numbers are given here, to events that each happened. Values that JSON cannot
hold are the strings "NaN", "Infinity" and "-Infinity", which float() reads back.
"""

import fcntl
import json
import logging
import math
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_READ_BYTES = 4 << 20
# A file server may take the lock of a node that crashed for held until it misses that node.
_SECONDS_TO_LOCK_AGAIN = 120.0
EXIT_BUSY = 73
"""Another process writes the journal. What it does is not this one's to tell of."""

_KIND = re.compile("[a-z_]+")  # It becomes part of names that MLflow is particular about.


class JournalError(OSError):
    """A journal that cannot be opened or written, in one line for the user."""


class JournalBusyError(JournalError):
    """Another process trains the run."""


class Journal:
    """Appends to one journal file. One process at a time may hold it open; threads may share it."""

    def __init__(self, path: Path) -> None:
        """Open or make the journal, and cut off a last line that a crash left unfinished.

        Raises:
            JournalError: the file cannot be written, or another process is writing it.
        """
        self.path = path
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._guard = _lock_file(path.with_name(f"{path.name}.lock"))
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            _cut_torn_line(self._file)
        except JournalError:
            raise
        except OSError as error:
            raise JournalError(f"{path} cannot be opened: {error.strerror or error}") from error
        self._last: dict[str, dict[str, Any]] = {}
        offset, end = -1, 0
        while offset != end:
            offset = end
            lines, end = read_lines(path, offset)
            self._last.update((line["kind"], line) for line in lines)

    def append(self, kind: str, step: int, values: Mapping[str, float]) -> bool:
        """Record the values of a step. False when the kind already has this step or a later one."""
        with self._lock:
            last = self._last.get(kind)
            if last is not None and step <= position(last):
                return False
            numbers = plain_values(values)
            self._write({"kind": kind, "step": step, "time_ms": _now_ms(), "values": numbers})
            return True

    def add(self, kind: str, **fields: Any) -> int:
        """Record an event and give its number within the kind, counted from 1."""
        with self._lock:
            last = self._last.get(kind)
            number = 1 if last is None else position(last) + 1
            self._write({"kind": kind, "number": number, "time_ms": _now_ms(), **fields})
            return number

    def last(self, kind: str) -> dict[str, Any] | None:
        """The last line of a kind, None before the first."""
        return self._last.get(kind)

    def sync(self) -> None:
        """Put everything written so far on disk.

        Called before a checkpoint gets its name, so that no checkpoint knows a step that the
        journal could still lose, and before lines are sent away, for the same reason.
        """
        with self._lock:
            if self._file < 0:
                return
            handle = os.dup(self._file)
        # Outside the lock: nobody who appends should wait for the disk.
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def close(self) -> None:
        """Flush, close, and let another process open the journal."""
        with self._lock:
            if self._file >= 0:
                os.fsync(self._file)
                os.close(self._file)
                os.close(self._guard)
                self._file = -1

    def _write(self, line: dict[str, Any]) -> None:
        if self._file < 0:
            raise JournalError(f"{self.path} is closed")
        if not _KIND.fullmatch(line["kind"]):
            raise ValueError(f"kind: found {line['kind']!r}, wanted lower-case letters and _")
        content = json.dumps(line, allow_nan=False).encode() + b"\n"
        size = os.fstat(self._file).st_size
        try:
            written = os.write(self._file, content)
            if written != len(content):
                raise OSError(f"{written} of {len(content)} bytes written")
        except OSError as error:
            # Half a line must not be there when the next one is appended.
            os.ftruncate(self._file, size)
            raise JournalError(
                f"{self.path} cannot be written: {error.strerror or error}"
            ) from error
        self._last[line["kind"]] = line


def position(line: Mapping[str, Any]) -> int:
    """Where a line stands within its kind: its step or its number."""
    return int(line["number"] if "number" in line else line["step"])


def read_lines(path: Path, offset: int = 0) -> tuple[list[dict[str, Any]], int]:
    """Some whole lines from an offset in bytes on, and the offset behind the last of them.

    The offset stays where it was when there is none. An unfinished last line is left for the next
    call. A line in the middle that is no JSON is skipped with a warning: the disk damaged it, and
    the rest is still good.
    """
    with path.open("rb") as file:
        file.seek(offset)
        # A long run's journal is tens of megabytes, and several times that as objects.
        content = file.read(_READ_BYTES) + file.readline()
    end = content.rfind(b"\n") + 1
    return list(_parse(content[:end], path)), offset + end


def _parse(content: bytes, path: Path) -> Iterator[dict[str, Any]]:
    for raw in content.splitlines():
        try:
            line = json.loads(raw)
            position(line), line["kind"], line["time_ms"]
        except (ValueError, KeyError, TypeError):
            logger.warning("%s holds a damaged line, which is skipped: %.80r", path, raw)
        else:
            yield line


def plain_values(values: Mapping[str, float]) -> dict[str, float | str]:
    """Numbers as a line holds them; float() reads each of them back exactly."""
    result: dict[str, float | str] = {}
    for name, value in values.items():
        number = float(value)
        if math.isnan(number):
            result[name] = "NaN"
        elif math.isinf(number):
            result[name] = "Infinity" if number > 0 else "-Infinity"
        else:
            result[name] = number
    return result


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _lock_file(path: Path) -> int:
    """Hold a lock until the process ends.

    A POSIX lock on a file of its own: unlike flock it is not inherited by data loading workers,
    which may outlive a killed trainer by seconds, and closing some other file descriptor of the
    journal does not drop it. A job that was queued again waits for it.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    seconds = _SECONDS_TO_LOCK_AGAIN if "SLURM_RESTART_COUNT" in os.environ else 0.0
    deadline = time.monotonic() + seconds
    is_told = False
    while True:
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except (BlockingIOError, PermissionError) as error:
            holder = os.pread(handle, 200, 0).decode(errors="replace").strip()
            text = f"{path.with_suffix('')} is being written by another process ({holder})"
            if time.monotonic() >= deadline:
                os.close(handle)
                raise JournalBusyError(text) from error
        except OSError as error:
            # Some network file systems have no locks. The run is still sound with one writer.
            logger.warning("%s cannot be locked: %s", path, error.strerror)
            return handle
        if not is_told:
            logger.warning("%s; waiting for %.0f s at most", text, seconds)
            is_told = True
        time.sleep(0.2)
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"pid {os.getpid()} on {os.uname().nodename}\n".encode(), 0)
    return handle


def _cut_torn_line(handle: int) -> None:
    end = size = os.fstat(handle).st_size
    while end > 0:
        begin = max(0, end - 65_536)
        newline = os.pread(handle, end - begin, begin).rfind(b"\n")
        if newline >= 0:
            end = begin + newline + 1
            break
        end = begin
    if end != size:
        os.ftruncate(handle, end)
