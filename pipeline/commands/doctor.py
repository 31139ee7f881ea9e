"""`longhaul doctor`: what this machine or allocation can run, and why not."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", nargs="?", help="a run whose needs are checked as well")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="overrides the file")


def main(args: argparse.Namespace) -> int:
    from longhaul.pipeline.doctor.diagnosis import diagnose
    from longhaul.pipeline.runs.folder import load_run

    if args.config is None:
        return diagnose(None)
    return diagnose(load_run(args.config, args.overrides))
