"""Shows the progress of long work: a bar on a terminal, otherwise a line every few seconds."""

import os
import sys
import time
from typing import NoReturn, TextIO

from tqdm import tqdm

_SECONDS_BETWEEN_LINES = 5.0


def shows_bars(stream: TextIO) -> bool:
    """Whether this is a terminal with columns. A bar on one without, as CI may have, is nothing."""
    try:
        return stream.isatty() and os.get_terminal_size(stream.fileno()).columns > 0
    except OSError:
        return False


class TokenProgress:
    """Shows the tokens done and tokens per second."""

    def __init__(self, total: int | None, what: str = "", *, times: int = 1) -> None:
        """Prepare the display; the first call of `show` starts it.

        Args:
            total: tokens of the whole work, None if unknown.
            what: name of the work, shown in front.
            times: factor by which `add` multiplies its tokens, such as the number of processes that
                work alike; 0 shows nothing.
        """
        self._total = total
        self._times = times
        self._what = f"{what}: " if what else ""
        self._bar: tqdm[NoReturn] | None = None
        self._first: int | None = None
        self._done = 0
        self._shown = time.monotonic()
        # When the first tokens were done, and how many: imports and the like came before that.
        self._begun: tuple[float, int] | None = None

    def __enter__(self) -> "TokenProgress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def show(self, done: int) -> None:
        """Show the tokens done so far. The first call passes those done before this process."""
        self._done = done
        if not self._times:
            return
        if self._first is None:
            self._first = done
            self._shown = time.monotonic()
            if shows_bars(sys.stderr):
                self._bar = tqdm(
                    desc=self._what.rstrip(": ") or None,
                    total=self._total,
                    initial=done,
                    unit=" tokens",
                    unit_scale=True,
                )
        elif self._bar is not None:
            self._bar.update(done - self._bar.n)
        else:
            self._show_line(done)

    def _show_line(self, done: int) -> None:
        now = time.monotonic()
        is_due = now - self._shown >= _SECONDS_BETWEEN_LINES
        rate = ""
        if self._begun is not None and now > self._begun[0]:
            seconds, tokens = now - self._begun[0], done - self._begun[1]
            rate = f", {tokens / seconds:,.0f} tokens/s"
        elif self._begun is None and done != self._first:
            self._begun = now, done
            self._shown = now
        if is_due:
            self._shown = now
            of = f" of {self._total:,}" if self._total else ""
            print(f"{self._what}{done:,}{of} tokens{rate}", file=sys.stderr, flush=True)

    def add(self, tokens: int) -> None:
        """Add tokens to those done. `show` must have been called before."""
        done = self._done + tokens * self._times
        # This process's share may be a little larger than that of the others.
        self.show(done if self._total is None else min(done, self._total))
