"""`longhaul train`: start the run that a config names, or resume it; or a sweep of runs."""

import argparse
import sys
from collections.abc import Sequence

from longhaul.pipeline.arguments import (
    add_config_arguments,
    add_sweep_arguments,
    sweep_axes,
)
from longhaul.pipeline.terminal.output import message
from longhaul.pipeline.tracking.metrics_journal import EXIT_BUSY, JournalBusyError
from longhaul.pipeline.training.preemption import nothing_to_save


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    add_sweep_arguments(parser)
    parser.add_argument(
        "--parallel",
        type=int,
        default=1,
        metavar="N",
        help="with --sweep or --seeds: most runs at the same time; default %(default)s",
    )


def main(args: argparse.Namespace) -> int:
    with nothing_to_save():
        return _train(args)


def _train(args: argparse.Namespace) -> int:
    axes = sweep_axes(args)
    if axes or args.parallel != 1:
        return _train_sweep(args, axes)
    from longhaul.pipeline.system.lightning_import import import_lightning

    import_lightning()  # before anything else imports it
    from longhaul.pipeline.planning.capacity import check_capacity
    from longhaul.pipeline.planning.out_of_memory import with_advice
    from longhaul.pipeline.runs.folder import load_run, remember_named
    from longhaul.pipeline.runs.named_keys import TRAINED
    from longhaul.pipeline.system.open_files import check_open_files
    from longhaul.pipeline.training.post_mortem import OutOfGpuMemory
    from longhaul.pipeline.training.run import train

    config = load_run(args.config, args.overrides)
    check_capacity(config)
    check_open_files(config.trainer.world_size)
    remember_named(config, args.config, args.overrides, TRAINED)
    try:
        return train(config)
    except JournalBusyError as error:
        print(f"longhaul: {message(error)}", file=sys.stderr)
        return EXIT_BUSY
    except OutOfGpuMemory as error:
        raise with_advice(error, config) from error


def _train_sweep(args: argparse.Namespace, axes: Sequence[str]) -> int:
    if not axes:
        raise ValueError(f"--parallel: found {args.parallel} without --sweep, wanted both or none")
    if args.parallel < 1:
        raise ValueError(f"--parallel: found {args.parallel}, wanted 1 or more")
    from longhaul.pipeline.planning.capacity import check_capacity
    from longhaul.pipeline.runs.named_keys import TRAINED
    from longhaul.pipeline.runs.sweep import read_sweep, remember_sweep
    from longhaul.pipeline.training.local_sweep import train_sweep

    sweep = read_sweep(args.config, args.overrides, axes, TRAINED)
    # Each run checks itself too, but only when its turn comes, after hours of the runs before.
    for config in sweep.configs:
        check_capacity(config)
    remember_sweep(sweep, args.config, args.overrides, axes, TRAINED)
    return train_sweep(sweep, parallel=args.parallel)
