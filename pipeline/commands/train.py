"""`longhaul train`: start the run that a config names, or resume it; or a sweep of runs."""

import argparse
import sys

from longhaul.pipeline.commands.arguments import add_sweep_argument
from longhaul.pipeline.terminal.output import message
from longhaul.pipeline.tracking.metrics_journal import EXIT_BUSY, JournalBusyError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="a YAML file, or a preset such as run/demo.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="overrides the file")
    add_sweep_argument(parser)
    parser.add_argument(
        "--parallel",
        type=int,
        default=1,
        metavar="N",
        help="with --sweep: most runs at the same time; default %(default)s",
    )


def main(args: argparse.Namespace) -> int:
    if args.sweep or args.parallel != 1:
        return _train_sweep(args)
    from longhaul.pipeline.planning.capacity import check_capacity
    from longhaul.pipeline.planning.out_of_memory import with_advice
    from longhaul.pipeline.runs.folder import load_run
    from longhaul.pipeline.training.post_mortem import OutOfGpuMemory
    from longhaul.pipeline.training.run import train

    config = load_run(args.config, args.overrides)
    check_capacity(config)
    try:
        return train(config)
    except JournalBusyError as error:
        print(f"longhaul: {message(error)}", file=sys.stderr)
        return EXIT_BUSY
    except OutOfGpuMemory as error:
        raise with_advice(error, config) from error


def _train_sweep(args: argparse.Namespace) -> int:
    if not args.sweep:
        raise ValueError(f"--parallel: found {args.parallel} without --sweep, wanted both or none")
    if args.parallel < 1:
        raise ValueError(f"--parallel: found {args.parallel}, wanted 1 or more")
    from longhaul.pipeline.planning.capacity import check_capacity
    from longhaul.pipeline.runs.sweep import read_sweep
    from longhaul.pipeline.training.local_sweep import train_sweep

    sweep = read_sweep(args.config, args.overrides, args.sweep)
    # Each run checks itself too, but only when its turn comes, after hours of the runs before.
    for config in sweep.configs:
        check_capacity(config)
    return train_sweep(sweep, parallel=args.parallel)
