"""Shows a run's progress: a bar on a terminal, plain lines elsewhere."""

import sys
import time
from typing import NoReturn

from tqdm import tqdm

from longhaul.modules.pretraining import Update
from longhaul.modules.progress import Progress

_SECONDS_BETWEEN_LINES = 10.0


class ProgressLine:
    """Step, loss, tokens/s and time left of a run with a known number of updates."""

    def __init__(self, name: str, num_updates: int) -> None:
        self.name = name
        self.num_updates = num_updates
        self._bar: tqdm[NoReturn] | None = None
        self._first_step = 0
        self._began = 0.0
        self._last_line = 0.0

    def begin(self, progress: Progress) -> None:
        """Start showing progress, from the run's current step."""
        if progress.step:
            self._print(f"resumed at step {progress.step}, {progress.tokens:,} tokens")
        if sys.stdout.isatty():
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
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {update.loss:.3f}, {tokens_per_second:,.0f} tokens/s")
            self._bar.update()
        elif (
            time.monotonic() - self._last_line >= _SECONDS_BETWEEN_LINES
            or progress.step == self.num_updates
        ):
            self._last_line = time.monotonic()
            self._print(
                f"step {progress.step}/{self.num_updates}  loss {update.loss:.4f}  "
                f"{tokens_per_second:,.0f} tokens/s  {self._time_left(progress.step)} left"
            )

    def validation(self, progress: Progress, loss: float) -> None:
        """Show a validation loss."""
        self._print(f"step {progress.step}/{self.num_updates}  validation loss {loss:.4f}")

    def end(self) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()

    def _print(self, text: str) -> None:
        line = f"{self.name}: {text}"
        if self._bar is not None:
            self._bar.write(line, file=sys.stdout)
        else:
            print(line, flush=True)

    def _time_left(self, step: int) -> str:
        if step == self._first_step:
            return "?"
        seconds = (time.monotonic() - self._began) / (step - self._first_step)
        return str(tqdm.format_interval(seconds * (self.num_updates - step)))
