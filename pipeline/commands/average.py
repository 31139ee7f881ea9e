"""`longhaul average`: write the mean of a run's last checkpoints as a run folder."""

import argparse

from longhaul.pipeline.system.atomic_folder import new_or_empty_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run folder, or the last checkpoint to take")
    parser.add_argument(
        "destination", metavar="DST", help="a folder that does not exist, or is empty"
    )
    parser.add_argument(
        "--last",
        type=int,
        metavar="N",
        help="number of checkpoints, 2 or more; default: checkpoint.keep_last of the run",
    )


def main(args: argparse.Namespace) -> int:
    from longhaul.configs.run_folders import named_run

    if args.last is not None and args.last < 2:
        raise ValueError(f"--last: found {args.last}, wanted 2 or more")
    named_run(args.run)
    new_or_empty_folder(args.destination)
    # After the arguments are checked, since this import takes seconds.
    from longhaul.pipeline.runs.averaging import average

    steps = average(args.run, args.destination, args.last)
    print(
        f"written: {args.destination}, the mean of {len(steps)} checkpoints, of the steps "
        f"{', '.join(f'{step:,}' for step in steps)}"
    )
    return 0
