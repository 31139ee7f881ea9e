"""`longhaul doctor`: what this machine or allocation can run, and why not."""

import argparse

from longhaul.pipeline.arguments import add_config_arguments, check_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, is_required=False)


def main(args: argparse.Namespace) -> int:
    if args.config is not None:
        check_config(args.config, args.overrides)
    from longhaul.pipeline.doctor.diagnosis import diagnose
    from longhaul.pipeline.runs.folder import load_run

    return diagnose(None if args.config is None else load_run(args.config, args.overrides))
