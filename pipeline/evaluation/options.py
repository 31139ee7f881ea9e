"""Options that several tasks of `longhaul evaluate` have.

The class `Options` of a task's file is a dataclass with some of these classes as bases. Every field
is an option of the command: its docstring is the help, its default applies where nothing is given.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """The base of all options of tasks."""

    is_shared: ClassVar[bool] = True
    """Whether all ranks share the work; otherwise the first rank does all of it."""


@dataclass(frozen=True, kw_only=True)
class TextOptions(TaskOptions):
    """Of a task that reads a text."""

    text: tuple[Path, ...] = ()
    """Texts to measure on instead of validation shards; stands after RUN, or RUN would be read as
    one of them."""


@dataclass(frozen=True, kw_only=True)
class ContextOptions(TaskOptions):
    """Of a task that reads windows of one length."""

    context: int | None = None
    """Tokens per window, by default as in training; the total hardly changes."""


@dataclass(frozen=True, kw_only=True)
class BosOptions(TaskOptions):
    """Of a task that can leave out the beginning-of-sequence id."""

    no_bos: bool = False
    """Read without the beginning-of-sequence id in front."""

    @property
    def bos(self) -> str:
        """Whether that id is in front, as tables have it: yes or no."""
        return "no" if self.no_bos else "yes"
