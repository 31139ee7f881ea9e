"""Requests to stop, to save or to profile: signals to any rank, and files in the run folder.

A signal is only recorded here. After each update the ranks agree on what to do (callback.py). A
thread records the signals, because a rank that waits in a collective runs no Python handlers.
"""

import logging
import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from pathlib import Path
from types import FrameType
from typing import Any, cast

import psutil

from longhaul.datamodules.files.untrusted import one_line, open_regular
from longhaul.pipeline.system.waiting import CONNECT_S, REPEATED_SIGNAL_S

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGHUP)
# Exit status of a run that has saved a checkpoint and is to be run again. In sysexits.h it is
# EX_TEMPFAIL, which asks to try again later.
EXIT_CHECKPOINTED = 75
# Number of updates that an empty file PROFILE asks for, and the largest number that it may ask for:
# a trace is kept in memory until it is complete.
_DEFAULT_TRACED_UPDATES, _MAX_TRACED_UPDATES = 3, 100
# So much of a request is read.
_MOST_REQUEST_BYTES = 64


@contextmanager
def nothing_to_save() -> Iterator[None]:
    """Context of the imports and checks before StopRequests, in which a signal ends the process.

    Its status asks to run the command again, as where something is saved.
    """

    def end(number: int, frame: FrameType | None) -> None:
        received = signal.Signals(number)
        _end_process(f"{received.name} before the training began", received, EXIT_CHECKPOINTED)

    default = [number for number in SIGNALS if signal.getsignal(number) == signal.SIG_DFL]
    for number in default:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in default:
            signal.signal(number, signal.SIG_DFL)


class _RequestFile:
    """A file that a user makes in the run folder to ask for something.

    Whatever has its name, it never ends the training, nor is it waited for: what is no file, or
    cannot be removed when the request is met, is told of once and ignored.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ignored: tuple[int, int] | None = None  # inode and time of what was told of

    def read(self) -> str | None:
        """The beginning of its text, None if there is no such request."""
        try:
            status = self.path.lstat()
        except OSError:  # usually because there is nothing
            return None
        found = status.st_ino, status.st_ctime_ns
        if found == self._ignored:
            return None
        try:
            if stat.S_ISLNK(status.st_mode):
                raise ValueError(f"{self.path}: found a link, wanted a regular file")
            with open_regular(self.path) as file:
                return file.read(_MOST_REQUEST_BYTES).decode(errors="replace").strip()
        except PermissionError:  # another user's file is a request all the same
            return ""
        except FileNotFoundError:  # removed just now
            return None
        except (OSError, ValueError) as error:
            self._ignored = found
            logger.warning("%s; it is ignored", one_line(error))
            return None

    def remove(self, rename_to: str | None = None) -> None:
        """Remove it, or give it another name, because the request is met."""
        try:
            status = self.path.lstat()
            if rename_to is None:
                self.path.unlink()
            else:
                self.path.rename(self.path.with_name(rename_to))
        except FileNotFoundError:
            return
        except OSError as error:
            self._ignored = status.st_ino, status.st_ctime_ns
            what = "removed" if rename_to is None else f"renamed to {rename_to}"
            logger.warning("%s cannot be %s: %s; it is ignored", self.path, what, error.strerror)


class StopRequests:
    """Context in which a first signal asks to stop, and a second ends the process at once."""

    def __init__(self, folder: Path, deadline_s: float) -> None:
        """Prepare the context; it takes effect when it is entered.

        Args:
            folder: the run folder, in which a user makes the files STOP, SAVE and PROFILE.
            deadline_s: how long a stop may take, in seconds; then the process ends.
        """
        self._stop, self._save, self._profile = (
            _RequestFile(folder / name) for name in ("STOP", "SAVE", "PROFILE")
        )
        self._deadline_s = deadline_s
        self._received: signal.Signals | None = None
        self._received_at = 0.0
        self._ranks_connected = threading.Event()
        self._is_interrupted = threading.Event()
        self._reader, self._writer = socket.socketpair()
        self._has_ended = threading.Event()
        self._previous: dict[signal.Signals, Any] = {}
        self._previous_mask: set[Any] = set()
        self._previous_fd = -1
        self._terminals: list[int] = []
        self.on_interrupt: Callable[[], object] = lambda: None
        """Called when a user interrupts this rank, before it ends."""

    def __enter__(self) -> "StopRequests":
        self._writer.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._previous = {n: signal.getsignal(n) for n in (*SIGNALS, signal.SIGINT)}
        # Once a terminal is closed, this can no longer be asked.
        self._terminals = [number for number in (1, 2) if os.isatty(number)]
        self.install_handlers()
        signal.signal(signal.SIGINT, self._interrupt)
        threading.Thread(target=self._listen, name="signals", daemon=True).start()
        # Slurm signals every process of a job step. Those that this one starts, such as compilers,
        # inherit that the signals are blocked, and are not ended by them.
        self._previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        return self

    def install_handlers(self) -> None:
        """Replace Lightning's handlers, which would forward SIGTERM to the other ranks."""
        for number in SIGNALS:
            if number == signal.SIGHUP and self._previous[number] == signal.SIG_IGN:
                continue  # `nohup` asks to go on after the terminal is closed
            # A handler is needed, because the default action would end the process.
            signal.signal(number, _ignore)

    def mark_ranks_connected(self) -> None:
        """From now on the ranks can agree on a stop."""
        self._ranks_connected.set()

    def __exit__(self, *exception: object) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._previous_mask)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_fd)
        self._has_ended.set()
        self._writer.close()

    @property
    def has_signal(self) -> bool:
        """Whether this rank received a signal."""
        return self._received is not None

    @property
    def wants_stop(self) -> bool:
        """Whether this rank received a signal, or the file STOP exists."""
        return self.has_signal or self._stop.read() is not None

    @property
    def wants_save(self) -> bool:
        """Whether the file SAVE exists."""
        return self._save.read() is not None

    @property
    def updates_to_trace(self) -> int:
        """Number of updates that the file PROFILE asks to trace; 0 if it is missing or invalid."""
        text = self._profile.read()
        if text is None:
            return 0
        if not text:
            return _DEFAULT_TRACED_UPDATES
        # Long texts are no numbers: Python refuses to convert those of more than 4,300 digits.
        is_number = text.isdecimal() and len(text) < _MOST_REQUEST_BYTES
        if is_number and 1 <= int(text) <= _MAX_TRACED_UPDATES:
            return int(text)
        logger.warning(
            "%s: found %.40r, wanted nothing or a number of updates, 1 to %d; it is removed",
            self._profile.path,
            text,
            _MAX_TRACED_UPDATES,
        )
        self.clear_profile()
        return 0

    def clear_profile(self) -> None:
        """Remove the file PROFILE, because its trace has started."""
        self._profile.remove()

    def clear_stop_and_save(self) -> None:
        """Remove SAVE and rename STOP to STOPPED, because their checkpoint is saved or in progress.

        The sbatch script does not requeue a run whose folder holds STOPPED.
        """
        self._save.remove()
        self._stop.remove(rename_to="STOPPED")

    def _listen(self) -> None:
        # This process may itself have been started with the signals blocked.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        while numbers := self._reader.recv(16):
            for number in numbers:
                if number in SIGNALS:
                    self._record_signal(signal.Signals(number))
                elif number == signal.SIGINT:
                    threading.Thread(target=self._enforce_interrupt, daemon=True).start()
        self._reader.close()

    def _record_signal(self, number: signal.Signals) -> None:
        if number == signal.SIGHUP:
            self._leave_terminal()
        if self._received is not None:
            if time.monotonic() - self._received_at < REPEATED_SIGNAL_S:
                return
            _end_process(
                f"{number.name} after {self._received.name}: ending without a checkpoint", number
            )
        self._received, self._received_at = number, time.monotonic()
        threading.Thread(target=self._enforce_deadline, args=(number,), daemon=True).start()

    def _leave_terminal(self) -> None:
        """Print to nowhere, because printing to a terminal that is closed fails."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for terminal in self._terminals:
            os.dup2(nowhere, terminal)
        os.close(nowhere)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._is_interrupted.set()
        raise KeyboardInterrupt

    def _enforce_interrupt(self) -> None:
        self.on_interrupt()
        # The main thread may wait for other ranks in C++ code, which Python cannot interrupt.
        if not self._is_interrupted.wait(CONNECT_S):
            _end_process("interrupted while waiting for other ranks", signal.SIGINT)

    def _enforce_deadline(self, number: signal.Signals) -> None:
        if not self._ranks_connected.wait(CONNECT_S):
            # There is nothing to save yet.
            _end_process(f"{number.name} while waiting for other ranks", number, EXIT_CHECKPOINTED)
        if not self._has_ended.wait(self._deadline_s):
            _end_process(
                f"not stopped {self._deadline_s:g} s after {number.name}: ending now", number
            )


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing: the thread `_listen` records the signal."""


def _end_process(message: str, number: signal.Signals, status: int | None = None) -> None:
    os.write(2, f"longhaul: {message}\n".encode())
    # The ranks that this process started would wait for it. The resource tracker ends by itself,
    # after it has removed the semaphores of the data workers' queues.
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if child.pid != cast(Any, resource_tracker)._resource_tracker._pid:
                child.kill()
    os._exit(128 + number if status is None else status)
