"""`longhaul report`: draw an MLflow experiment as figures, tables and one page."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("experiment", metavar="EXPERIMENT", help="its name in MLflow")
    parser.add_argument(
        "destination",
        metavar="DST",
        help="a folder that does not exist, is empty, or is a report, to be drawn again",
    )
    # As in TrackingConfig, which takes seconds to import; a test compares them.
    parser.add_argument(
        "--uri", default="sqlite:///mlflow.db", help="MLflow's tracking URI; default %(default)s"
    )
    parser.add_argument(
        "--runs",
        type=lambda text: tuple(text.split(",")),
        default=(),
        metavar="NAME,...",
        help="only these runs; * and ? stand for other letters",
    )
    parser.add_argument(
        "--filter",
        default="",
        metavar="SEARCH",
        help="only runs that MLflow finds by this, such as \"params.data = 'mine/train'\"",
    )
    parser.add_argument(
        "--against",
        metavar="KIND",
        help="the kind that gaps are to; default softmax, or else the first",
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

    files = report(
        args.experiment,
        args.destination,
        args.uri,
        names=args.runs,
        search=args.filter,
        against=args.against,
        sequences=args.sequences,
    )
    for file in files:
        print(f"written: {file}")
    return 0
