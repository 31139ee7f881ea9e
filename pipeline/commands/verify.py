"""`longhaul verify`: check and time everything on this machine, in pieces of a few minutes."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Check and time everything on this machine: the kernels against float64, the trainer with "
        "every strategy that the devices allow, then the speed. Exit status 75: the time was over "
        "before all checks had run; the same command goes on with the rest."
    )
    parser.add_argument(
        "--json",
        type=Path,
        default=Path("verify.json"),
        metavar="FILE",
        help="the results; a file that is there is gone on with; default %(default)s",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        metavar="N",
        help="end after so many minutes, 6 or more; default: when all checks have run",
    )


def main(args: argparse.Namespace) -> int:
    if not args.json.parent.is_dir():
        raise ValueError(f"--json: found no folder {args.json.parent}, wanted one for the results")
    from longhaul.pipeline.verification.run import verify

    return verify(args.json, args.minutes)
