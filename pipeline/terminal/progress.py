"""How far long work has got: a bar on a terminal, otherwise a line every few seconds."""

import sys
import time
from types import TracebackType
from typing import NoReturn

from tqdm import tqdm

_SECONDS_BETWEEN_LINES = 5.0


class TokenProgress:
    """Tokens done and tokens a second; `what` goes in front.

    Each token that `add` tells of counts `times` times; 0 shows nothing.
    """

    def __init__(self, total: int | None, what: str = "", *, times: int = 1) -> None:
        self._total = total
        self._times = times
        self._what = f"{what}: " if what else ""
        self._bar: tqdm[NoReturn] | None = None
        self._first: int | None = None
        self._done = 0
        self._started = self._shown = time.monotonic()

    def __enter__(self) -> "TokenProgress":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def show(self, done: int) -> None:
        """Take note of the tokens done so far; the first call tells those of earlier starts."""
        self._done = done
        if not self._times:
            return
        if self._first is None:
            self._first = done
            self._started = self._shown = time.monotonic()
            if sys.stderr.isatty():
                self._bar = tqdm(
                    desc=self._what.rstrip(": ") or None,
                    total=self._total,
                    initial=done,
                    unit=" tokens",
                    unit_scale=True,
                )
        elif self._bar is not None:
            self._bar.update(done - self._bar.n)
        elif time.monotonic() - self._shown >= _SECONDS_BETWEEN_LINES:
            self._shown = time.monotonic()
            rate = (done - self._first) / (self._shown - self._started)
            of = f" of {self._total:,}" if self._total else ""
            line = f"{self._what}{done:,}{of} tokens, {rate:,.0f} tokens/s"
            print(line, file=sys.stderr, flush=True)

    def add(self, tokens: int) -> None:
        """So many tokens more, after a first call of `show`."""
        self.show(self._done + tokens * self._times)
