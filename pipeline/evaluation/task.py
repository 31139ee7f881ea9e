"""What a task of `longhaul evaluate` is given, and what it returns.

Without torch, which takes seconds to import: the command's help is made of this.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from longhaul.pipeline.runs.trained_model import TrainedModel

SHORTEST_PASSKEY = 256
"""Tokens of the shortest passkey prompts."""

PASSKEY_DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of the filler text that stand before the key."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line says to all tasks; each reads what concerns it."""

    text: tuple[Path, ...] = ()
    """Text files to measure on; none means the run's validation shards."""

    context: int | None = None
    """Tokens of a window, about as many windows' tokens in all; None means as in training."""

    contexts: tuple[int, ...] | None = None
    """Lengths of windows, tokens, ascending; None means some around the training context."""

    stride: int | None = None
    """Tokens that a sliding window moves at a time; None means 256, or the shortest window."""

    lengths: int | None = None
    """Longest passkey prompt, tokens; None means four training contexts."""

    prompts: int = 20
    """Passkey prompts a length; sequences of recall a size."""

    lm_eval_tasks: tuple[str, ...] = ("longhaul_pairs",)
    """Names by which lm_eval knows its tasks; by default the one that longhaul brings."""


@dataclass(frozen=True)
class TaskResult:
    """Numbers by the names that MLflow shows, and the files that were written."""

    values: dict[str, float]
    files: tuple[Path, ...] = ()


Measure: TypeAlias = "Callable[[TrainedModel, Options, Path], TaskResult]"


@dataclass(frozen=True)
class Task:
    """One thing to measure, by a module of longhaul.pipeline.evaluation.tasks."""

    module: str
    """Its name there. Its function `measure` writes files into the folder that it is given."""

    help: str
    is_shared: bool = True
    """Done by all ranks, each with its share of the work; otherwise by the first rank alone."""

    decided_by: tuple[str, ...] = ()
    """The fields of Options that change its result."""

    @property
    def measure(self) -> Measure:
        name = f"longhaul.pipeline.evaluation.tasks.{self.module}"
        measure: Measure = importlib.import_module(name).measure
        return measure
