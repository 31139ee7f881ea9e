"""The arguments of commands that read a trained model."""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from longhaul.pipeline.runs.trained_model import NamedModel


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of a command that reads a trained model."""
    parser.add_argument("run", help="a run folder, or one of its checkpoints")
    parser.add_argument(
        "--positions",
        default="none",
        metavar="none|linear|dynamic_ntk",
        help="how rotary positions are scaled; default %(default)s",
    )
    parser.add_argument(
        "--factor", type=float, help="times by which the context is to grow, with --positions"
    )


def named_model(args: argparse.Namespace) -> "NamedModel":
    """The model that a command line names, not yet loaded."""
    from longhaul.pipeline.runs.trained_model import NamedModel

    if args.factor is not None and args.positions == "none":
        raise ValueError(
            f"--factor: found {args.factor:g} with --positions none, wanted linear or dynamic_ntk"
        )
    if args.factor is None and args.positions != "none":
        raise ValueError(f"--factor: missing, and --positions {args.positions} needs one")
    return NamedModel(args.run, args.positions, 1.0 if args.factor is None else args.factor)
