"""`longhaul report`: draw an MLflow experiment as figures, tables and one page."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("experiment", metavar="EXPERIMENT", help="its name in MLflow")
    parser.add_argument(
        "destination", metavar="DST", help="a folder that does not exist, or is empty"
    )
    parser.add_argument(
        "--uri", help="MLflow's tracking URI; default: the one of a config without tracking.uri"
    )


def main(args: argparse.Namespace) -> int:
    from longhaul.configs.schema import TrackingConfig
    from longhaul.pipeline.reporting.folder import report

    uri = TrackingConfig.uri if args.uri is None else args.uri
    for file in report(args.experiment, args.destination, uri):
        print(f"written: {file}")
    return 0
