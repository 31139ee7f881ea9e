"""`longhaul evaluate`: measure checkpoints on held-out text, or on synthetic tasks."""

import argparse
import logging
import re
import sys
from pathlib import Path

from longhaul.pipeline.commands.arguments import add_model_arguments, named_model
from longhaul.pipeline.commands.task_arguments import add_task_arguments, task_options
from longhaul.pipeline.evaluation.registry import TASKS, check_tasks
from longhaul.pipeline.terminal.output import message
from longhaul.pipeline.tracking.metrics_journal import EXIT_BUSY, JournalBusyError

logger = logging.getLogger(__name__)


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
