"""`longhaul status`: show the progress of the runs in a folder."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "roots", nargs="*", default=["runs"], metavar="ROOT", help="a run, or a folder of runs"
    )
    parser.add_argument("--experiment", metavar="NAME", help="only runs of this MLflow experiment")


def main(args: argparse.Namespace) -> int:
    from longhaul.pipeline.cluster.status import print_status

    print_status(args.roots, args.experiment)
    return 0
