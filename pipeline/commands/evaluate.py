"""`longhaul evaluate`: measure a checkpoint on held-out text, or on synthetic tasks."""

import argparse
import sys

from longhaul.pipeline.commands.arguments import add_model_arguments, named_model
from longhaul.pipeline.commands.task_arguments import add_task_arguments, task_options
from longhaul.pipeline.evaluation.registry import TASKS, check_tasks
from longhaul.pipeline.tracking.metrics_journal import EXIT_BUSY, JournalBusyError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
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


def main(args: argparse.Namespace) -> int:
    names, options = args.tasks.split(","), task_options(args)
    check_tasks(names, "--tasks")
    named = named_model(args)
    # After the options are checked, since this import takes seconds.
    from longhaul.pipeline.evaluation.run import evaluate_checkpoint

    try:
        evaluate_checkpoint(
            named, names, options, data=args.data, devices=args.devices, again=args.again
        )
    except JournalBusyError as error:
        print(f"longhaul: {error}", file=sys.stderr)
        return EXIT_BUSY
    return 0
