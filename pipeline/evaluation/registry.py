"""The tasks of `longhaul evaluate`: the files of the folder tasks/, in alphabetical order.

The files are read, and not imported, since they import torch, which takes seconds: the command's
help would have to wait for it.
"""

import ast
import functools
import inspect
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from longhaul.pipeline.evaluation import options, tasks
from longhaul.pipeline.evaluation.task import Option, Task

if TYPE_CHECKING:
    from longhaul.pipeline.evaluation.tables import TaskTable


def read_task(file: Path) -> Task:
    """The task in a file of the folder, without its code.

    Raises ValueError if it has no class `Options`.
    """
    tree = ast.parse(file.read_bytes())
    classes = _classes(ast.parse(Path(options.__file__).read_bytes())) | _classes(tree)
    if "Options" not in classes:
        raise ValueError(f"{file}: found no class Options, wanted that of the task's options")
    help_text = (ast.get_docstring(tree) or "").partition("\n\n")[0]
    found = dict(_options(classes["Options"], classes))
    return Task(f"{tasks.__name__}.{file.stem}", _as_help(help_text), found)


def _classes(tree: ast.Module) -> dict[str, ast.ClassDef]:
    return {one.name: one for one in tree.body if isinstance(one, ast.ClassDef)}


def _options(
    definition: ast.ClassDef, classes: dict[str, ast.ClassDef]
) -> Iterator[tuple[str, Option]]:
    """The fields of a dataclass, after those of its base classes."""
    for base in definition.bases:
        yield from _options(classes[ast.unparse(base)], classes)
    for line, below in pairwise([*definition.body, ast.Pass()]):
        if not isinstance(line, ast.AnnAssign) or line.value is None:
            continue
        written = ast.unparse(line.annotation)
        if not written.startswith("ClassVar"):
            text = below.value.value if isinstance(below, ast.Expr) else ""  # type: ignore[attr-defined]
            default = ast.literal_eval(line.value)
            yield ast.unparse(line.target), Option(written, default, _as_help(text))


def _as_help(docstring: str) -> str:
    """A docstring as argparse's help: one line that neither begins nor ends like a sentence."""
    line = " ".join(inspect.cleandoc(docstring).split()).removesuffix(".")
    return line[:1].lower() + line[1:]


TASKS: dict[str, Task] = {
    file.stem.replace("_", "-"): read_task(file)
    for file in sorted(Path(tasks.__file__).parent.glob("[!_]*.py"))
}
"""The tasks by name, in the order in which they run."""


@functools.cache
def task_tables() -> "dict[str, TaskTable]":
    """The tables that tasks write, by their names without .csv. It imports all tasks."""
    found = (getattr(task.module, "TABLES", ()) for task in TASKS.values())
    return {table.name: table for some in found for table in some}


def check_tasks(names: Sequence[str], where: str) -> None:
    """Raise ValueError for a name that is no task; `where` is the config key or option with it."""
    for name in names:
        if name not in TASKS:
            raise ValueError(f"{where}: found {name!r}, wanted some of {','.join(TASKS)}")
