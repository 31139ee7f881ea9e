"""Requests to stop, to save or to profile: signals to any rank, and files in the run folder.

A signal only leaves a note here; the ranks agree on it when an update is done (updates.py). The
notes are taken by a thread, since a rank that waits in a collective runs no Python handler.
"""

import logging
import os
import signal
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
# A forked process, such as a data loader's worker, shares the trainer's descriptors: a signal that
# it gets must not look like one of the trainer's.
os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
# What the shell and Slurm see of a run that has saved its state and wants to be run again; of the
# codes in sysexits.h the one that invites to try later.
EXIT_CHECKPOINTED = 75
# A scheduler that signals the step and the batch script, which passes it on, makes two of one.
_SECONDS_OF_ONE_REQUEST = 2.0
# Between a signal and the end, where the ranks have not all found each other yet.
_SECONDS_TO_MEET = 5.0
# Updates that the file PROFILE asks for when it is empty, and at most: all is kept in memory first.
_PROFILED, _MOST_PROFILED = 3, 100


class StopRequests:
    """Within it, the first of SIGNALS is a request, and a later one ends the process at once."""

    def __init__(self, folder: Path, deadline_s: float) -> None:
        """Name where the files would be, and how long a stop may take."""
        self._files = {name: folder / name for name in ("STOP", "SAVE")}
        self._profile_file = folder / "PROFILE"
        self._deadline_s = deadline_s
        self._received: signal.Signals | None = None
        self._received_at = 0.0
        self._have_met = threading.Event()
        self._is_interrupted = threading.Event()
        self._reader, self._writer = socket.socketpair()
        self._is_over = threading.Event()
        self._previous: dict[signal.Signals, Any] = {}
        self._previous_fd = -1

    def __enter__(self) -> "StopRequests":
        self._writer.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._previous = {n: signal.getsignal(n) for n in (*SIGNALS, signal.SIGINT)}
        self.keep_signals()
        signal.signal(signal.SIGINT, self._interrupt)
        threading.Thread(target=self._listen, name="signals", daemon=True).start()
        return self

    def keep_signals(self) -> None:
        """Take the signals back from Lightning, which would pass SIGTERM on to the other ranks."""
        for number in SIGNALS:
            # Something has to be there, or the default would end the process.
            signal.signal(number, _noted_elsewhere)

    def ranks_have_met(self) -> None:
        """From now on all ranks are there to agree on a stop."""
        self._have_met.set()

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_fd)
        self._is_over.set()
        self._writer.close()

    @property
    def has_signal(self) -> bool:
        """Whether a signal came to this rank."""
        return self._received is not None

    @property
    def wants_stop(self) -> bool:
        """Whether a signal came, or somebody made the file STOP."""
        return self.has_signal or self._files["STOP"].exists()

    @property
    def wants_save(self) -> bool:
        """Whether somebody made the file SAVE."""
        return self._files["SAVE"].exists()

    @property
    def wanted_profile(self) -> int:
        """Updates to be traced, as the file PROFILE says; 0 where there is none, or a bad one."""
        try:
            found = self._profile_file.read_text(errors="replace").strip()
        except OSError:  # most often, there is none
            return 0
        if not found:
            return _PROFILED
        if found.isdecimal() and 1 <= int(found) <= _MOST_PROFILED:
            return int(found)
        logger.warning(
            "%s: found %.40r, wanted nothing or a number of updates, 1 to %d; it is removed",
            self._profile_file,
            found,
            _MOST_PROFILED,
        )
        self.clear_profile()
        return 0

    def clear_profile(self) -> None:
        """Remove the file PROFILE: what it asks for begins."""
        self._profile_file.unlink(missing_ok=True)

    def clear_files(self) -> None:
        """Remove SAVE, and make STOP into STOPPED: a stop is saved by now, a save has begun.

        The script of a Slurm job does not go on with a run that was stopped by hand.
        """
        self._files["SAVE"].unlink(missing_ok=True)
        with suppress(FileNotFoundError):
            self._files["STOP"].rename(self._files["STOP"].with_name("STOPPED"))

    def _listen(self) -> None:
        while numbers := self._reader.recv(16):
            for number in numbers:
                if number in SIGNALS:
                    self._note(signal.Signals(number))
                elif number == signal.SIGINT:
                    threading.Thread(target=self._enforce_interrupt, daemon=True).start()
        self._reader.close()

    def _note(self, number: signal.Signals) -> None:
        if self._received is not None:
            if time.monotonic() - self._received_at < _SECONDS_OF_ONE_REQUEST:
                return
            _end(f"{number.name} after {self._received.name}: ending without a checkpoint", number)
        self._received, self._received_at = number, time.monotonic()
        threading.Thread(target=self._enforce_deadline, args=(number,), daemon=True).start()

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._is_interrupted.set()
        raise KeyboardInterrupt

    def _enforce_interrupt(self) -> None:
        # The thread that Python would interrupt may wait for other ranks, outside of Python.
        if not self._is_interrupted.wait(_SECONDS_TO_MEET):
            _end("interrupted while waiting for other ranks", signal.SIGINT)

    def _enforce_deadline(self, number: signal.Signals) -> None:
        if not self._have_met.wait(_SECONDS_TO_MEET):
            # There is nothing to save yet.
            _end(f"{number.name} while waiting for other ranks", number, EXIT_CHECKPOINTED)
        if not self._is_over.wait(self._deadline_s):
            _end(f"not stopped {self._deadline_s:g} s after {number.name}: ending now", number)


def _noted_elsewhere(number: int, frame: FrameType | None) -> None:
    pass


def _end(message: str, number: signal.Signals, status: int | None = None) -> None:
    os.write(2, f"longhaul: {message}\n".encode())
    # Ranks that this one started, and those that read ahead, would wait for it.
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            child.kill()
    os._exit(128 + number if status is None else status)
