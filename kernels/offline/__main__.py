"""Compile every Triton kernel for real chips, on a machine that needs none of them.

    python -m longhaul.kernels.offline [--targets sm_90,gfx942] [--only TEXT]

prints the registers, shared memory and stack that each kernel takes, in every configuration, and
fails when one spills or does not fit. compilation.py explains how; each op has a list of its calls.
"""

from __future__ import annotations

import argparse
import sys

from longhaul.kernels.offline.compilation import CHIPS, INTERPRETED, is_interpreting
from longhaul.kernels.offline.table import print_table
from longhaul.kernels.ops import OPS


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m longhaul.kernels.offline", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--targets", default=",".join(CHIPS), help="some of " + ", ".join(CHIPS))
    parser.add_argument(
        "--only",
        default="",
        help="only shapes with this text in their name; also print PTX folders",
    )
    options = parser.parse_args(arguments)
    targets = options.targets.split(",")
    if unknown := set(targets) - set(CHIPS):
        parser.error(f"--targets: found {min(unknown)!r}, wanted some of {', '.join(CHIPS)}")
    every = {name: launch for op in OPS for name, launch in op.shapes.items()}
    shapes = {name: launch for name, launch in every.items() if options.only in name}
    if not shapes:
        parser.error(
            f"--only: found {options.only!r}, wanted part of a name such as {next(iter(every))!r}"
        )
    if is_interpreting():
        parser.error(INTERPRETED)
    found = print_table(shapes, targets, folders=bool(options.only))
    for fault in found:
        print(fault, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
