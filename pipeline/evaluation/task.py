"""A task of `longhaul evaluate`: its options, its functions and its result."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from longhaul.pipeline.evaluation.options import TaskOptions


@dataclass(frozen=True)
class TaskResult:
    """The numbers of a task by their names in MLflow, and the files that it wrote."""

    values: dict[str, float]
    files: tuple[Path, ...] = ()


OPTION_TYPES = (
    *("int", "float", "str", "bool", "tuple[int, ...]", "tuple[str, ...]", "tuple[Path, ...]"),
    "dict[str, Any]",
)
"""Types of options, each also with `| None`; others are `Literal`s."""


class Option(NamedTuple):
    """A field of a task's options, as the file has it."""

    type: str
    """The annotation, such as `int | None`."""

    default: Any
    help: str


@dataclass(frozen=True)
class Task:
    """A file in longhaul.pipeline.evaluation.tasks, read without being imported."""

    module_name: str
    help: str
    options: Mapping[str, Option]

    @property
    def module(self) -> Any:
        """The imported file: its `Options`, `check`, `measure` and, if it has tables, `TABLES`."""
        return importlib.import_module(self.module_name)

    def options_from(self, values: Mapping[str, Any]) -> TaskOptions:
        """The task's options, from the values of those of all tasks."""
        known = {name: value for name, value in values.items() if name in self.options}
        options: TaskOptions = self.module.Options(**known)
        return options
