"""`longhaul evaluate`: measure checkpoints on held-out text, or on synthetic tasks."""

import argparse
import ast
import json
import logging
import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longhaul.pipeline.arguments import add_model_arguments, named_model, parse_contexts
from longhaul.pipeline.evaluation.registry import TASKS, check_tasks
from longhaul.pipeline.evaluation.task import Option
from longhaul.pipeline.terminal.output import message
from longhaul.pipeline.tracking.metrics_journal import EXIT_BUSY, JournalBusyError

logger = logging.getLogger(__name__)

_ARGUMENTS: dict[str, dict[str, Any]] = {
    "int": {"type": int, "metavar": "N"},
    "float": {"type": float, "metavar": "X"},
    "str": {"metavar": "TEXT"},
    "bool": {"action": "store_true"},
    "tuple[int, ...]": {"metavar": "N,N,..."},
    "tuple[str, ...]": {"metavar": "NAME,NAME,..."},
    "tuple[Path, ...]": {"metavar": "FILE", "action": "extend", "nargs": "+", "type": Path},
    "dict[str, Any]": {"metavar": "JSON"},
}
"""By the type of a field, without `| None`: keywords for argparse. The values of a `Literal` are
choices."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser, has_several=True)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    width = max(map(len, TASKS))
    parser.epilog = "tasks:\n" + "\n".join(
        f"  {name:<{width}}  {task.help}" for name, task in TASKS.items()
    )
    parser.add_argument(
        "--tasks",
        default="positions",
        help="names from the list below, separated by commas; default %(default)s",
    )
    add_task_arguments(parser)
    parser.add_argument(
        "--data",
        metavar="FOLDER",
        help="where the run's shards are now: their folder, or the one that holds train and "
        "validation",
    )
    parser.add_argument(
        "--devices",
        type=int,
        default=1,
        help="processes that share the work, one device each; default %(default)s",
    )
    parser.add_argument(
        "--again", action="store_true", help="repeat tasks that already have results"
    )


def _is_of_a_sweep(folder: Path) -> bool:
    """Whether this is the folder that a sweep has beside its runs: `runs/NAME-*` names it too."""
    is_one = (folder / "configs").is_dir() and not (folder / "config.yaml").exists()
    if is_one:
        logger.info("%s: left out, the folder of a sweep", folder)
    return is_one


def main(args: argparse.Namespace) -> int:
    from longhaul.configs.run_folders import named_run

    names = args.tasks.split(",")
    check_tasks(names, "--tasks")
    options = task_options(args, names)
    for run in args.run:
        if re.fullmatch(r"\d+[a-zA-Z]?", run) and not Path(run).exists():
            raise ValueError(
                f"RUN: found {run}, no such folder; numbers of one option have commas between "
                "them, such as 1024,65536"
            )
    runs = [run for run in args.run if len(args.run) == 1 or not _is_of_a_sweep(Path(run))]
    if not runs:
        raise ValueError("RUN: found only folders of sweeps, wanted runs")
    if len(runs) == 1:  # of several, those that are there are evaluated
        named_run(runs[0])
    models = [named_model(args, run) for run in runs]
    # After the options are checked, since this import takes seconds.
    from longhaul.pipeline.evaluation.run import check_options, evaluate_checkpoint

    check_options(names, options, args.devices)
    failed = []
    for model in models:
        try:
            evaluate_checkpoint(
                model, names, options, data=args.data, devices=args.devices, again=args.again
            )
        except (ValueError, OSError, RuntimeError) as error:
            if len(models) == 1 and isinstance(error, JournalBusyError):
                print(f"longhaul: {message(error)}", file=sys.stderr)
                return EXIT_BUSY
            if len(models) == 1 or isinstance(error, BrokenPipeError):
                raise
            named, told = str(model.run_or_checkpoint), str(error)
            logger.error("%s", told if told.startswith(named) else f"{named}: {told}")
            failed.append(named)
    if failed:
        which = ", ".join(failed)
        raise RuntimeError(f"evaluate: found {len(failed)} of {len(models)} that failed: {which}")
    return 0


def add_task_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one argument per field of the options of tasks."""
    for name, of_tasks in _fields().items():
        tasks = defaultdict[str, list[str]](list)
        for task, option in of_tasks.items():
            default = option.default
            shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
            tasks[option.help + (f"; default {shown}" if default else "")].append(task)
        help_text = "; ".join(f"{', '.join(some)}: {text}" for text, some in tasks.items())
        kind = _type(of_tasks)
        if name == "context":
            # Where all tasks read --contexts, it is another name of that one.
            keywords: dict[str, Any] = {"metavar": "N"}
            help_text += "; with tasks that read --contexts, the same as that"
        elif kind.startswith("Literal"):
            keywords = {"choices": ast.literal_eval(kind.removeprefix("Literal"))}
        else:
            keywords = _ARGUMENTS[kind]
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


def _type(of_tasks: dict[str, Option]) -> str:
    first, *_ = of_tasks.values()
    return first.type.removesuffix(" | None")


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
        if given[name] is not None:
            value = _parse("--" + name.replace("_", "-"), _type(of_tasks), given[name])
            if any(value != option.default for option in of_tasks.values()):
                values[name] = value
    return values


def _parse(option: str, kind: str, value: Any) -> Any:
    """The value of a field of this type, from what argparse has found."""
    if kind == "tuple[int, ...]":
        return tuple(sorted(set(parse_contexts(value, option) or ())))
    if kind == "tuple[str, ...]":
        return tuple(value.split(","))
    if kind == "tuple[Path, ...]":
        return tuple(value)
    if not kind.startswith("dict"):
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not found:
        raise ValueError(f'{option}: found {value!r}, wanted a JSON object such as {{"name": 1}}')
    return found
