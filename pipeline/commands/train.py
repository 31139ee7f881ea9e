"""`longhaul train`: start the run that a config names, or resume it."""

import argparse
import sys

from longhaul.pipeline.tracking.metrics_journal import EXIT_BUSY, JournalBusyError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="a YAML file, or a preset such as run/demo.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="overrides the file")


def main(args: argparse.Namespace) -> int:
    from longhaul.configs import load_run_config
    from longhaul.pipeline.planning.capacity import check_capacity
    from longhaul.pipeline.runs.folder import with_absolute_paths
    from longhaul.pipeline.training.run import train

    config = with_absolute_paths(load_run_config(args.config, args.overrides), args.config)
    check_capacity(config)
    try:
        return train(config)
    except JournalBusyError as error:
        print(f"longhaul: {error}", file=sys.stderr)
        return EXIT_BUSY
