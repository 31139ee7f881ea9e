"""Ends a job of which one rank is dead or stuck, and says which, instead of waiting for ever.

Every rank notes what it is doing in the store by which the ranks found each other. A thread of each
rank looks at its own clock and, on rank 0, at the notes of the others.
"""

import json
import logging
import os
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

logger = logging.getLogger(__name__)

_BEAT_S = 1.0
# A rank whose thread has not reported for this long has ended, or its machine has.
_SILENCE_S = 20.0
_ABORT = "longhaul/abort"
_LEFT = "longhaul/left"
_FAILED = "longhaul/failed"


class Watchdog:
    """Watches a rank, and on rank 0 all of them, until `stop`."""

    def __init__(
        self, rank: int, world_size: int, hang_s: float, last_words: Callable[[], object]
    ) -> None:
        """Begin to watch.

        Args:
            rank, world_size: of all ranks.
            hang_s: longest that an update, a validation or a save may take.
            last_words: called before the process is ended.
        """
        self._rank, self._world_size, self._hang_s = rank, world_size, hang_s
        self._last_words = last_words
        self._doing = (0, "starting")
        self._since = time.monotonic()
        self._stopping = threading.Event()
        self._store: Any = None
        if dist.is_initialized():
            # A copy of its own: a client's requests wait for each other.
            self._store = cast(Any, _get_default_store()).clone()
        self._seen: dict[int, tuple[str, float]] = {}
        self._main = threading.main_thread().ident
        self._last_beat = time.monotonic()
        for target in (self._beat, self._watch):
            threading.Thread(target=target, name="watchdog", daemon=True).start()

    def note(self, step: int, doing: str) -> None:
        """What this rank does from now on, after so many updates."""
        self._doing = (step, doing)
        self._since = time.monotonic()

    def stop(self) -> None:
        """Watch no longer. Rank 0, which has the store, waits until all ranks are here.

        Not through a collective: a rank that closes its connections right after its part of one
        makes the others fail in theirs now and then.
        """
        self._stopping.set()
        if self._store is None:
            return
        self._store.set(f"{_LEFT}{self._rank}", "")
        if self._rank == 0:
            ranks = [f"{_LEFT}{rank}" for rank in range(self._world_size)]
            try:
                self._store.wait(ranks, timedelta(seconds=_SILENCE_S))
            except RuntimeError:
                logger.warning("not all ranks have ended %.0f s after this one", _SILENCE_S)
            for rank in ranks:
                self._store.delete_key(rank)

    def give_up(self, words: str) -> str | None:
        """Watch no longer, since this rank failed, and tell the other ranks with which words.

        Returns:
            On rank 0, a sentence on the ranks that ended or failed with other words, which is empty
            if all are there or failed like this one. On the others None if rank 0 failed with the
            same words, and so says them for all; else an empty sentence.
        """
        self._stopping.set()
        if self._store is None:
            return ""
        try:
            self._store.set(f"{_FAILED}{self._rank}", words)
        except RuntimeError:  # rank 0, whose store it is, has ended
            return ""
        if self._rank:
            return None if self._read_failure(0, 2 * _BEAT_S) == words else ""
        self._read_notes()
        before = {rank: text for rank, (text, _) in self._seen.items()}
        time.sleep(3 * _BEAT_S)
        self._read_notes()
        told = []
        for rank in range(1, self._world_size):
            failure = self._read_failure(rank)
            text, _ = self._seen.get(rank, (None, 0.0))
            if failure is not None and failure != words:
                told.append(f"rank {rank} failed: {failure}")
            elif failure is None and text == before.get(rank):
                place = "before its first update" if text is None else _told(text)
                told.append(f"rank {rank} is gone, last seen {place}")
        return "; ".join(told)

    def _read_failure(self, rank: int, patience_s: float = 0.0) -> str | None:
        """What a rank said when it gave up, None if it has not, or if the store is gone."""
        key = f"{_FAILED}{rank}"
        try:
            if patience_s:
                self._store.wait([key], timedelta(seconds=patience_s))
            elif not self._store.check([key]):
                return None
            return str(self._store.get(key).decode())
        except RuntimeError:
            return None

    def _watch(self) -> None:
        """Look at the clock; never at the store, which may not answer."""
        while not self._stopping.wait(_BEAT_S):
            idle = time.monotonic() - self._since
            # Rank 0 can tell who is to blame, so the others leave it some time to do so.
            if idle > self._hang_s + (_SILENCE_S if self._rank else 0):
                self._abort(f"no progress for {idle:.0f} s: {self._places()}")
            if time.monotonic() - self._last_beat > 2 * _SILENCE_S:
                self._end(f"rank 0 does not answer rank {self._rank}, {self._here()}")

    def _beat(self) -> None:
        """Tell the store, and look there; at once, since a rank may fail within a second."""
        while True:
            self._last_beat = time.monotonic()
            try:
                if self._store is not None:
                    self._check()
            except Exception as error:
                # The store is rank 0's: where it cannot be reached, rank 0 has ended.
                if not self._stopping.wait(_BEAT_S):
                    words = str(error).splitlines()[0]
                    self._end(
                        f"rank 0 is gone, seen from rank {self._rank}, {self._here()}: {words}"
                    )
            if self._stopping.wait(_BEAT_S):
                return

    def _check(self) -> None:
        step, doing = self._doing
        note = [step, doing, self._where(), time.time()]
        self._store.set(f"longhaul/rank{self._rank}", json.dumps(note))
        if self._store.check([_ABORT]):
            self._end(self._store.get(_ABORT).decode())
        if self._rank == 0:
            self._read_notes()
            for rank, (text, since) in self._seen.items():
                if time.monotonic() - since > _SILENCE_S:
                    self._abort(f"rank {rank} is gone, last seen {_told(text)}")

    def _read_notes(self) -> None:
        """When each rank's note last changed, by this machine's clock."""
        for rank in range(1, self._world_size):
            key = f"longhaul/rank{rank}"
            if not self._store.check([key]):
                continue
            text = self._store.get(key).decode()
            if self._seen.get(rank, ("", 0.0))[0] != text:
                self._seen[rank] = text, time.monotonic()

    def _places(self) -> str:
        """Where all ranks are, as far as is known here; those that few others share come first."""
        places: dict[str, list[int]] = defaultdict(list)
        places[self._here()].append(self._rank)
        for rank, (text, _) in self._seen.items():
            places[_told(text)].append(rank)
        rarest = sorted(places.items(), key=lambda entry: (len(entry[1]), entry[0]))[:4]
        return "; ".join(f"{_named(ranks)} {place}" for place, ranks in rarest)

    def _here(self) -> str:
        step, doing = self._doing
        return f"after step {step}, {doing} at {self._where()}"

    def _where(self) -> str:
        """The line of Python that the main thread is at."""
        frame = sys._current_frames().get(self._main or 0)
        if frame is None:
            return "an unknown place"
        last = traceback.extract_stack(frame)[-1]
        return f"{os.path.basename(last.filename)}:{last.lineno} {last.name}"

    def _abort(self, message: str) -> None:
        """End this rank, and tell the others to."""
        if self._store is not None:
            self._store.set(_ABORT, message)
            # Rank 0 has the store: the others must have read it.
            time.sleep(3 * _BEAT_S)
        self._end(message)

    def _end(self, message: str) -> None:
        os.write(2, f"longhaul: {message}; the job is ended\n".encode())
        logger.error("%s; the job is ended", message)
        self._last_words()
        os._exit(1)


def _told(text: str) -> str:
    """A note in words."""
    step, doing, where, _ = json.loads(text)
    return f"after step {step}, {doing} at {where}"


def _named(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:3])) + (" and others" if len(ranks) > 3 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
