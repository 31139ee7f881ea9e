"""The arguments of `longhaul evaluate` that are options of tasks."""

import argparse
import ast
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longhaul.pipeline.commands.arguments import parse_contexts
from longhaul.pipeline.evaluation.registry import TASKS, check_tasks
from longhaul.pipeline.evaluation.task import Option

_COUNT: dict[str, Any] = {"type": int, "metavar": "N"}
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "int": _COUNT,
    "int | None": _COUNT,
    "bool": {"action": "store_true"},
    "tuple[int, ...] | None": {"metavar": "N,N,..."},
    "tuple[str, ...]": {"metavar": "NAME,NAME,..."},
    "tuple[Path, ...]": {"metavar": "FILE", "action": "extend", "nargs": "+", "type": Path},
    "dict[str, Any] | None": {"metavar": "JSON"},
}
"""By the type of a field, what argparse is given. A `Literal` has its values as choices."""


def add_task_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one argument per field of the options of tasks."""
    for name, of_tasks in _fields().items():
        tasks = defaultdict[str, list[str]](list)
        for task, option in of_tasks.items():
            tasks[option.help].append(task)
        help_text = "; ".join(f"{', '.join(some)}: {text}" for text, some in tasks.items())
        first, *_ = of_tasks.values()
        default = first.default
        if default:
            help_text += f"; default {','.join(default) if isinstance(default, tuple) else default}"
        if name == "context":
            # Where all tasks read --contexts, it is another name of that one.
            keywords: dict[str, Any] = {"metavar": "N"}
            help_text += "; with tasks that read --contexts, the same as that"
        elif first.type.startswith("Literal"):
            choices = ast.literal_eval(first.type.removeprefix("Literal"))
            keywords = {"choices": choices}
        else:
            keywords = _ARGUMENTS[first.type]
        parser.add_argument(
            "--" + name.replace("_", "-"), **keywords, help=help_text.replace("%", "%%")
        )


def _fields() -> dict[str, dict[str, Option]]:
    """The options of all tasks by name: for each task with one, the field of it."""
    found = defaultdict[str, dict[str, Option]](dict)
    for name, task in TASKS.items():
        for field, option in task.options.items():
            found[field][name] = option
    return found


def task_options(args: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """The values that the arguments give to options of tasks, for the tasks of these names."""
    context, contexts = parse_contexts(args.context, "--context"), args.contexts
    check_tasks(names, "--tasks")
    read = [TASKS[name].options for name in names]
    if contexts is None and all("contexts" in one and "context" not in one for one in read):
        context, contexts = None, args.context
    if context is not None and len(context) > 1:
        raise ValueError(
            f"--context: found {args.context} with {args.tasks}, wanted one number, or the tasks "
            "context and perplexity alone, which read several"
        )
    given = vars(args) | {"context": None if context is None else context[0], "contexts": contexts}
    values = {}
    for name, of_tasks in _fields().items():
        first, *_ = of_tasks.values()
        if given[name] is not None:
            value = _parse("--" + name.replace("_", "-"), first.type, given[name])
            if value != first.default:
                values[name] = value
    return values


def _parse(option: str, kind: str, value: Any) -> Any:
    """The value of a field of this type, from what argparse has found."""
    if kind == "tuple[int, ...] | None":
        return tuple(sorted(set(parse_contexts(value, option) or ())))
    if kind == "tuple[str, ...]":
        return tuple(value.split(","))
    if kind == "tuple[Path, ...]":
        return tuple(value)
    return _parse_object(option, value) if kind.startswith("dict") else value


def _parse_object(option: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not found:
        raise ValueError(f'{option}: found {text!r}, wanted a JSON object such as {{"name": 1}}')
    return found
