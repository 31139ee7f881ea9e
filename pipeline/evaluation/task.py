"""What a task of `longhaul evaluate` is given, and what it returns.

This module does not import torch, which takes seconds, because the command's help is made from it.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from longhaul.pipeline.runs.trained_model import TrainedModel

SHORTEST_PASSKEY = 256
"""Length of the shortest passkey prompts, in tokens."""

PASSKEY_DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""The grid of the key's depths: the share of the filler text that comes before it."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line's options for all tasks; each task reads those that concern it."""

    text: tuple[Path, ...] = ()
    """Text files to measure on; none means the run's validation shards."""

    context: int | None = None
    """Tokens per window; None means as in training. The total number of tokens hardly changes."""

    contexts: tuple[int, ...] | None = None
    """Lengths of windows in tokens, ascending; None means lengths around the training context."""

    stride: int | None = None
    """Tokens by which a sliding window moves; None means 256, or the shortest window if shorter."""

    document_tokens: int | None = None
    """Tokens that are read of each document, from its start; None means all, window by window."""

    no_bos: bool = False
    """Whether texts and prompts are read without the beginning-of-sequence id in front."""

    lengths: tuple[int, ...] | None = None
    """Lengths of passkey prompts in tokens, ascending; None means powers of two up to four training
    contexts."""

    depths: str = "grid"
    """Where the key stands in passkey prompts: grid (PASSKEY_DEPTHS in turn) or random."""

    prompts: int = 20
    """passkey: prompts per length; recall: sequences per number of pairs."""

    lm_eval_tasks: tuple[str, ...] = ("longhaul_pairs",)
    """Names of lm_eval's tasks; by default the one that longhaul brings."""

    lm_eval_limit: int | None = None
    """The number of documents of each of these tasks; None means all."""

    lm_eval_shots: int | None = None
    """The number of solved examples in front of each document; None means the tasks' own."""

    lm_eval_metadata: dict[str, Any] | None = None
    """Given to tasks that make their documents, such as {"max_seq_lengths": [4096]} for RULER."""

    lm_eval_generation: dict[str, Any] | None = None
    """Arguments of generation that replace those of the tasks."""

    lm_eval_samples: bool = False
    """Whether each document, with what the model answered, is written too."""

    @property
    def bos(self) -> str:
        """Whether that id is in front, as tables have it: yes or no."""
        return "no" if self.no_bos else "yes"


@dataclass(frozen=True)
class TaskResult:
    """The numbers of a task by their names in MLflow, and the files that it wrote."""

    values: dict[str, float]
    files: tuple[Path, ...] = ()


Check: TypeAlias = "Callable[[TrainedModel, Options], None]"
Measure: TypeAlias = "Callable[[TrainedModel, Options, Path], TaskResult]"


@dataclass(frozen=True)
class Task:
    """The entry of one task in the registry."""

    module: str
    """Name of the task's module in longhaul.pipeline.evaluation.tasks, which has `check` and
    `measure`."""

    help: str
    is_shared: bool = True
    """Whether all ranks share the work; otherwise the first rank does all of it."""

    decided_by: tuple[str, ...] = ()
    """The fields of Options that change the task's result."""

    @property
    def check(self) -> Check:
        """Raises ValueError for a model or options that `measure` could do nothing with."""
        check: Check = self._imported().check
        return check

    @property
    def measure(self) -> Measure:
        measure: Measure = self._imported().measure
        return measure

    def _imported(self) -> ModuleType:
        return importlib.import_module(f"longhaul.pipeline.evaluation.tasks.{self.module}")
