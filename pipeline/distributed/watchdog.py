"""Ends a job in which a rank has died or hangs, and names that rank.

Without it the other ranks would wait for ever. Two threads run on every rank. One sends heartbeats:
it writes what the rank is doing to the key-value store (TCPStore) through which the ranks
connected, and on rank 0 it also reads the heartbeats of the other ranks. The second thread measures
how long this rank has made no progress.

A rank without heartbeats may only be stopped for a while, by a scheduler or a debugger, so rank 0
waits five minutes for it. A rank on rank 0's machine whose process has ended counts as dead.
"""

import json
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import psutil
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from longhaul.pipeline.system.waiting import DEAD_S, FAIL_S, HEARTBEAT_S, LATE_S, SILENT_S

logger = logging.getLogger(__name__)

_ABORT_KEY = "longhaul/abort"
_FINISHED_KEY = "longhaul/finished"
_FAILED_KEY = "longhaul/failed"
_INTERRUPTED_KEY = "longhaul/interrupted"


def process_space() -> str:
    """Equal in processes that see each other by their process numbers.

    A hostname does not tell: machines may share one, and a container has numbers of its own.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return socket.gethostname()


class Watchdog:
    """Watches this rank, and on rank 0 all ranks, until `stop`."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        hang_s: float,
        on_abort: Callable[[], object],
    ) -> None:
        """Start watching.

        Args:
            rank: this process's global rank.
            world_size: number of ranks.
            hang_s: longest time that an update, a validation or a save may take, in seconds.
            on_abort: called right before the watchdog ends the process.
        """
        self._rank, self._world_size = rank, world_size
        self._hang_s = hang_s
        self._on_abort = on_abort
        self._activity = (0, "starting")
        self._since = time.monotonic()
        self._processes = process_space()
        self._stopping = threading.Event()
        self._ending = threading.Lock()
        self._store: Any = None
        if dist.is_initialized():
            # A client of its own, because requests of one client wait for each other.
            self._store = cast(Any, _get_default_store()).clone()
            # The store does not answer while rank 0 is stopped.
            self._store.set_timeout(timedelta(seconds=hang_s + SILENT_S))
        # The last heartbeat of each other rank, and how often it was then read again.
        self._heartbeats: dict[int, tuple[str, int]] = {}
        self._main = threading.main_thread().ident
        self._last_sent = time.monotonic()
        for target in (self._send_heartbeats, self._check_progress):
            threading.Thread(target=target, name="watchdog", daemon=True).start()

    def set_activity(self, step: int, activity: str) -> None:
        """Report progress: from now on, after `step` updates, this rank is busy with `activity`."""
        self._activity = (step, activity)
        self._since = time.monotonic()

    def stop(self) -> None:
        """Stop watching. Each rank waits until all have called this.

        A barrier would not do: now and then, a rank that closes its connections right after its
        part of a collective makes the other ranks fail in theirs. Rank 0 hosts the store.
        """
        self._stopping.set()
        if self._store is None:
            return
        self._store.set(f"{_FINISHED_KEY}{self._rank}", "")
        if self._rank == 0:
            self._wait_for_ends()
        else:
            self._wait_for_first()

    def _wait_for_ends(self) -> None:
        keys = [f"{_FINISHED_KEY}{rank}" for rank in range(self._world_size)]
        began = time.monotonic()
        while True:
            try:
                self._store.wait(keys, timedelta(seconds=SILENT_S))
                break
            except RuntimeError:
                seconds = time.monotonic() - began
                missing = {n for n, key in enumerate(keys) if not self._store.check([key])}
                logger.warning("%s: not ended %.0f s after rank 0", _list_ranks(missing), seconds)
                if seconds > min(self._hang_s, DEAD_S) or all(map(self._has_ended, missing)):
                    break
        # A next watchdog of this process has the same store.
        for key in keys:
            self._store.delete_key(key)

    def _wait_for_first(self) -> None:
        """Until rank 0 removes the keys, once it has found all of them, or is gone."""
        began = time.monotonic()
        # All ranks together ask 400 times a second: rank 0's process answers them.
        pause_s = max(0.02, self._world_size / 400)
        with suppress(RuntimeError):
            while self._store.check([f"{_FINISHED_KEY}{self._rank}"]):
                if time.monotonic() - began > self._hang_s:
                    break
                time.sleep(pause_s)

    def _has_ended(self, rank: int) -> bool:
        """Whether the process of a rank on this machine has ended; False of another machine's."""
        text, _ = self._heartbeats.get(rank, (None, 0))
        if text is None:
            return False
        *_, place, process = json.loads(text)
        if place != self._processes:
            return False
        try:
            return bool(psutil.Process(process).status() == psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return True

    def report_interrupt(self) -> None:
        """Tell rank 0 that a user interrupts this rank, which is no failure of it."""
        if self._store is not None:
            with suppress(RuntimeError):  # rank 0, which hosts the store, has ended
                self._store.set(_INTERRUPTED_KEY, "")

    def report_failure(self, message: str) -> str | None:
        """Stop watching, because this rank failed, and send its error message to the other ranks.

        Returns:
            On rank 0, a sentence that names the ranks that died or failed with another message. It
            is empty if there are none. On the other ranks, None if rank 0 failed with the same
            message and therefore reports it for all, else an empty string.

        Raises:
            KeyboardInterrupt: on rank 0, if this rank failed because another was interrupted.
        """
        self._stopping.set()
        if self._store is None:
            return ""
        try:
            self._store.set(f"{_FAILED_KEY}{self._rank}", message)
        except RuntimeError:  # rank 0, which hosts the store, has ended
            return ""
        if self._rank:
            return None if self._read_failure(0, 2 * HEARTBEAT_S) == message else ""
        if self._is_interrupted():
            raise KeyboardInterrupt
        self._read_heartbeats()
        previous = {rank: text for rank, (text, _) in self._heartbeats.items()}
        time.sleep(3 * HEARTBEAT_S)
        self._read_heartbeats()
        findings = []
        for rank in range(1, self._world_size):
            failure = self._read_failure(rank)
            text, _ = self._heartbeats.get(rank, (None, 0.0))
            if failure is not None and failure != message:
                findings.append(f"rank {rank} failed: {failure}")
            elif failure is None and text == previous.get(rank):
                findings.append(
                    f"rank {rank} has not reported yet"
                    if text is None
                    else f"rank {rank} is gone, last seen {_describe(text)}"
                )
        return "; ".join(findings)

    def _is_interrupted(self) -> bool:
        try:
            return self._store is not None and bool(self._store.check([_INTERRUPTED_KEY]))
        except RuntimeError:
            return False

    def _read_failure(self, rank: int, timeout_s: float = 0.0) -> str | None:
        """The message of a rank that failed; None if it has not failed, or the store is gone."""
        key = f"{_FAILED_KEY}{rank}"
        try:
            if timeout_s:
                self._store.wait([key], timedelta(seconds=timeout_s))
            elif not self._store.check([key]):
                return None
            return str(self._store.get(key).decode())
        except RuntimeError:
            return None

    def _check_progress(self) -> None:
        """Thread that reads only the clock, never the store, which may not answer."""
        ticked = time.monotonic()
        while not self._stopping.wait(HEARTBEAT_S):
            now = time.monotonic()
            late, ticked = now - ticked - HEARTBEAT_S, now
            if late > LATE_S:
                logger.warning("rank %d was stopped for %.0f s, and goes on", self._rank, late)
                self._since += late
                self._last_sent += late
            idle, unanswered = now - self._since, now - self._last_sent
            # Rank 0 knows which rank hangs, so the others give it time to report that first.
            is_hanging = idle > self._hang_s + (2 * SILENT_S if self._rank else 0)
            if unanswered > DEAD_S or (unanswered > 2 * SILENT_S and is_hanging):
                self._end(f"rank 0 does not answer rank {self._rank}, {self._describe_self()}")
            if is_hanging:
                self._abort(f"no progress for {idle:.0f} s: {self._describe_ranks()}")

    def _send_heartbeats(self) -> None:
        """Thread that exchanges heartbeats, the first without delay: a rank may fail at once."""
        while True:
            self._last_sent = time.monotonic()
            try:
                if self._store is not None:
                    self._exchange_heartbeats()
            except Exception as error:
                # Rank 0 hosts the store, so a store that cannot be reached means rank 0 has ended.
                if not self._stopping.wait(HEARTBEAT_S):
                    where = f"rank {self._rank}, {self._describe_self()}"
                    reason = (str(error) or repr(error)).splitlines()[0]
                    self._end(f"rank 0 is gone, seen from {where}: {reason}")
            if self._stopping.wait(HEARTBEAT_S):
                return

    def _exchange_heartbeats(self) -> None:
        step, activity = self._activity
        # The time makes each heartbeat differ from the one before it.
        place = [self._processes, os.getpid()]
        heartbeat = [step, activity, self._current_line(), time.monotonic(), *place]
        self._store.set(f"longhaul/rank{self._rank}", json.dumps(heartbeat))
        if self._store.check([_ABORT_KEY]):
            self._end(self._store.get(_ABORT_KEY).decode())
        if self._rank == 0:
            self._read_heartbeats()
            for rank, (text, times) in self._heartbeats.items():
                self._check_silence(rank, text, times)

    def _check_silence(self, rank: int, text: str, times: int) -> None:
        # Counted by this thread's turns: while all ranks are stopped, none is silent.
        silent = times * HEARTBEAT_S
        if silent < FAIL_S:
            return
        # Asked before whether it has finished: a process ends after it says so.
        has_ended = self._has_ended(rank)
        if self._store.check([f"{_FINISHED_KEY}{rank}"]):
            return
        if has_ended or silent >= DEAD_S:
            failure = self._read_failure(rank)
            how = (
                f"is gone, last seen {_describe(text)}" if failure is None else f"failed: {failure}"
            )
            self._abort(f"rank {rank} {how}")
        if (times - 1) * HEARTBEAT_S < SILENT_S <= silent:
            logger.warning("rank %d is silent, and waited for: last seen %s", rank, _describe(text))

    def _read_heartbeats(self) -> None:
        """Note each other rank's heartbeat, and how often it was the same."""
        keys = {rank: f"longhaul/rank{rank}" for rank in range(1, self._world_size)}
        if len(self._heartbeats) < len(keys):  # multi_get would wait for those that are missing
            keys = {rank: key for rank, key in keys.items() if self._store.check([key])}
        # One request, whatever the number of ranks.
        texts = self._store.multi_get(list(keys.values())) if keys else []
        for rank, text in zip(keys, map(bytes.decode, texts), strict=True):
            last, times = self._heartbeats.get(rank, ("", 0))
            self._heartbeats[rank] = text, times + 1 if text == last else 0

    def _describe_ranks(self) -> str:
        """What the ranks are doing, as far as known here; what the fewest ranks do comes first."""
        ranks_doing: dict[str, list[int]] = defaultdict(list)
        ranks_doing[self._describe_self()].append(self._rank)
        # A copy, because the other thread may add a rank meanwhile.
        for rank, (text, times) in list(self._heartbeats.items()):
            silent = times * HEARTBEAT_S
            since = f"silent for {silent:.0f} s, last seen " if silent >= SILENT_S else ""
            ranks_doing[since + _describe(text)].append(rank)
        rarest = sorted(ranks_doing.items(), key=lambda entry: (len(entry[1]), entry[0]))[:4]
        return "; ".join(f"{_list_ranks(ranks)} {doing}" for doing, ranks in rarest)

    def _describe_self(self) -> str:
        step, activity = self._activity
        return f"after step {step}, {activity} at {self._current_line()}"

    def _current_line(self) -> str:
        """File, line and function that the main thread is executing."""
        frame = sys._current_frames().get(self._main or 0)
        if frame is None:
            return "an unknown place"
        last = traceback.extract_stack(frame)[-1]
        return f"{os.path.basename(last.filename)}:{last.lineno} {last.name}"

    def _abort(self, message: str) -> None:
        """End this rank, and make the other ranks end."""
        if self._store is not None:
            with suppress(RuntimeError):  # this rank has to end all the same
                self._store.set(_ABORT_KEY, message)
            # The store ends with rank 0, so the others need time to read the message.
            time.sleep(3 * HEARTBEAT_S)
        self._end(message)

    def _end(self, message: str) -> None:
        # Never released: the other thread may have a reason too, and must not end the process
        # while this one still records its own.
        self._ending.acquire()
        try:
            os.write(2, f"longhaul: {message}; the job is ended\n".encode())
            logger.error("%s; the job is ended", message)
            self._on_abort()
        finally:
            os._exit(130 if self._rank == 0 and self._is_interrupted() else 1)


def _describe(heartbeat: str) -> str:
    step, activity, line, *_ = json.loads(heartbeat)
    return f"after step {step}, {activity} at {line}"


def _list_ranks(ranks: Collection[int]) -> str:
    ranks = sorted(ranks)
    shown = ", ".join(map(str, ranks[:3])) + (" and others" if len(ranks) > 3 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
