"""`longhaul report`: an MLflow experiment as figures, tables and one page."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("experiment", metavar="EXPERIMENT", help="its name in MLflow")
    parser.add_argument("destination", metavar="DST", help="a folder that is not there, or empty")
    parser.add_argument(
        "--uri", help="where MLflow is; default: as in a config without tracking.uri"
    )


def main(args: argparse.Namespace) -> int:
    from longhaul.configs.schema import TrackingConfig
    from longhaul.pipeline.reporting.folder import report

    uri = TrackingConfig.uri if args.uri is None else args.uri
    for file in report(args.experiment, args.destination, uri):
        print(f"written: {file}")
    return 0
