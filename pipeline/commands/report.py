"""`longhaul report`: draw an MLflow experiment as figures, tables and one page."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("experiment", metavar="EXPERIMENT", help="its name in MLflow")
    parser.add_argument(
        "destination", metavar="DST", help="a folder that does not exist, or is empty"
    )
    # As in TrackingConfig, which takes seconds to import; a test compares them.
    parser.add_argument(
        "--uri", default="sqlite:///mlflow.db", help="MLflow's tracking URI; default %(default)s"
    )
    parser.add_argument(
        "--sequences",
        type=int,
        metavar="N",
        help="compare training losses after so many sequences; default the most that all finished "
        "runs have read",
    )


def main(args: argparse.Namespace) -> int:
    from longhaul.pipeline.reporting.folder import report

    for file in report(args.experiment, args.destination, args.uri, args.sequences):
        print(f"written: {file}")
    return 0
