"""The tasks of `longhaul evaluate`: the files of the folder tasks/, in alphabetical order.

The files are read, and not imported, since they import torch, which takes seconds: the command's
help would have to wait for it.
"""

import ast
import functools
import inspect
import logging
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from longhaul.datamodules.files.untrusted import one_line
from longhaul.pipeline.evaluation import options, tasks
from longhaul.pipeline.evaluation.task import OPTION_TYPES, Option, Task

if TYPE_CHECKING:
    from longhaul.pipeline.evaluation.tables import TaskTable

logger = logging.getLogger(__name__)


def read_task(file: Path) -> Task:
    """The task in a file of the folder, without its code.

    Raises ValueError if it has no class `Options`, or an option that no argument can give.
    """
    tree = ast.parse(file.read_bytes())
    classes = _classes(ast.parse(Path(options.__file__).read_bytes())) | _classes(tree)
    if "Options" not in classes:
        raise ValueError(f"{file}: found no class Options, wanted that of the task's options")
    help_text = (ast.get_docstring(tree) or "").partition("\n\n")[0]
    found = dict(_options(classes["Options"], classes))
    for name, option in found.items():
        kind = option.type.removesuffix(" | None")
        if kind not in OPTION_TYPES and not kind.startswith("Literal["):
            wanted = ", ".join([*OPTION_TYPES, "Literal[...]"])
            raise ValueError(f"{file}: {name}: found {kind}, wanted one of {wanted}")
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
        if not isinstance(line, ast.AnnAssign):
            continue
        written = ast.unparse(line.annotation)
        if not written.startswith("ClassVar"):
            if line.value is None:
                raise ValueError(f"{ast.unparse(line.target)}: found no default, wanted one")
            text = ast.literal_eval(below.value) if isinstance(below, ast.Expr) else ""
            default = ast.literal_eval(line.value)
            yield ast.unparse(line.target), Option(written, default, _as_help(text))


def _as_help(docstring: str) -> str:
    """A docstring as argparse's help: one line that neither begins nor ends like a sentence."""
    line = " ".join(inspect.cleandoc(docstring).split()).removesuffix(".")
    return line[:1].lower() + line[1:]


def _tasks() -> Iterator[tuple[str, Task]]:
    for file in sorted(Path(tasks.__file__).parent.glob("[!_.]*.py")):
        try:
            yield file.stem.replace("_", "-"), read_task(file)
        except Exception as error:
            # No file, such as one that is half written, may end a run or keep one from resuming.
            logger.warning("%s: left out, it is no task: %s", file, one_line(error))


TASKS: dict[str, Task] = dict(_tasks())
"""The tasks by name, in the order in which they run."""


@functools.cache
def task_tables() -> "dict[str, TaskTable]":
    """The tables that tasks write, by their names without .csv. It imports all tasks."""
    found: dict[str, TaskTable] = {}
    for name, task in TASKS.items():
        try:
            for table in getattr(task.module, "TABLES", ()):
                if table.name in found:
                    raise ValueError(f"found a second table called {table.name}, wanted one")
                found[table.name] = table
        except Exception as error:  # The file may do anything.
            logger.warning("%s: its tables are left out: %s", name, one_line(error))
    return found


def check_tasks(names: Sequence[str], where: str) -> None:
    """Raise ValueError for a name that is no task; `where` is the config key or option with it."""
    for name in names:
        if name not in TASKS:
            raise ValueError(f"{where}: found {name!r}, wanted some of {','.join(TASKS)}")
