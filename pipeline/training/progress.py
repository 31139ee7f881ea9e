"""Shows a run's progress: a bar on a terminal, plain lines elsewhere and in logs/train.log."""

import errno
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from tqdm import tqdm

from longhaul.modules.pretraining import Update
from longhaul.modules.progress import Progress
from longhaul.pipeline.terminal.progress import shows_bars

_SECONDS_BETWEEN_LINES = 10.0
# A long run writes about this many lines of losses to its log.
_LINES_IN_LOG = 1000

PROGRESS_LOGGER = logging.getLogger("longhaul.progress")
"""Takes what is shown, for logs/train.log alone: on the terminal it is shown already."""
PROGRESS_LOGGER.propagate = False
PROGRESS_LOGGER.setLevel(logging.INFO)


class ProgressLine:
    """Step, loss, tokens/s and time left of a run with a known number of updates."""

    def __init__(self, name: str, num_updates: int) -> None:
        self.name = name
        self.num_updates = num_updates
        self._bar: tqdm[NoReturn] | None = None
        self._first_step = 0
        self._began = 0.0
        self._last_line = 0.0
        self._logged_at, self._logged_step = 0.0, -num_updates

    def begin(self, progress: Progress) -> None:
        """Start showing progress, from the run's current step."""
        if progress.step:
            self.say(f"resumed at step {progress.step}, {progress.tokens:,} tokens")
        if shows_bars(sys.stdout):
            self._bar = tqdm(
                total=self.num_updates,
                initial=progress.step,
                desc=self.name,
                unit="step",
                file=sys.stdout,
                dynamic_ncols=True,
            )

    def update(self, progress: Progress, update: Update, tokens_per_second: float) -> None:
        """Show that another update is done."""
        if self._began == 0.0:
            # The first update includes warm-up, so the time left is estimated from later ones.
            self._first_step, self._began = progress.step, time.monotonic()
        line = (
            f"step {progress.step}/{self.num_updates}  loss {update.loss:.4f}  "
            f"{tokens_per_second:,.0f} tokens/s  {self._time_left(progress.step)} left"
        )
        now, is_last = time.monotonic(), progress.step == self.num_updates
        if self._bar is not None:
            with _terminal_may_be_closed():
                speed = f"{tokens_per_second:,.0f} tokens/s"
                self._bar.set_postfix_str(f"loss {update.loss:.3f}, {speed}")
                self._bar.update(progress.step - self._bar.n)
        elif now - self._last_line >= _SECONDS_BETWEEN_LINES or is_last:
            self._last_line = now
            self._print(line)
        is_due = (
            now - self._logged_at >= _SECONDS_BETWEEN_LINES
            and progress.step - self._logged_step >= self.num_updates / _LINES_IN_LOG
        )
        if is_due or is_last:
            self._logged_at, self._logged_step = now, progress.step
            PROGRESS_LOGGER.info("%s", line)

    def validation(self, progress: Progress, loss: float) -> None:
        """Show a validation loss."""
        self.say(f"step {progress.step}/{self.num_updates}  validation loss {loss:.4f}")

    def say(self, text: str) -> None:
        """Show a line, and log it."""
        self._print(text)
        PROGRESS_LOGGER.info("%s", text)

    def end(self) -> None:
        """Close the bar."""
        if self._bar is not None:
            with _terminal_may_be_closed():
                self._bar.close()

    def _print(self, text: str) -> None:
        line = f"{self.name}: {text}"
        with _terminal_may_be_closed():
            if self._bar is not None:
                self._bar.write(line, file=sys.stdout)
            else:
                print(line, flush=True)

    def _time_left(self, step: int) -> str:
        if step == self._first_step:
            return "?"
        seconds = (time.monotonic() - self._began) / (step - self._first_step)
        return str(tqdm.format_interval(seconds * (self.num_updates - step)))


@contextmanager
def _terminal_may_be_closed() -> Iterator[None]:
    """Ignore that a closed terminal shows nothing: SIGHUP is about to stop the run."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise
