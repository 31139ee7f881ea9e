"""The arguments that all commands which load a trained model have."""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from longhaul.pipeline.runs.trained_model import NamedModel


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add RUN, --positions and --factor."""
    parser.add_argument("run", help="a run folder, or one of its checkpoints")
    parser.add_argument(
        "--positions",
        default="none",
        metavar="none|linear|dynamic_ntk",
        help="how rotary positions are scaled; default %(default)s",
    )
    parser.add_argument(
        "--factor", type=float, help="with --positions: how many times longer the context becomes"
    )


def named_model(args: argparse.Namespace) -> "NamedModel":
    """The model that the arguments name, not loaded yet."""
    from longhaul.pipeline.runs.trained_model import NamedModel

    if args.factor is not None and args.positions == "none":
        raise ValueError(
            f"--factor: found {args.factor:g} with --positions none, wanted linear or dynamic_ntk"
        )
    if args.factor is None and args.positions != "none":
        raise ValueError(f"--factor: found none with --positions {args.positions}, wanted a number")
    return NamedModel(args.run, args.positions, 1.0 if args.factor is None else args.factor)
