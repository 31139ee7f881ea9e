"""Arguments that several commands have."""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from longhaul.pipeline.runs.trained_model import NamedModel


def add_model_arguments(parser: argparse.ArgumentParser, *, has_several: bool = False) -> None:
    """Add RUN, or RUN ..., --positions and --factor, for commands that load trained models."""
    parser.add_argument(
        "run",
        metavar="RUN",
        nargs="+" if has_several else None,
        help="a run folder, or one of its checkpoints",
    )
    parser.add_argument(
        "--positions",
        default="none",
        metavar="none|linear|dynamic_ntk",
        help="how rotary positions are scaled; default %(default)s",
    )
    parser.add_argument(
        "--factor", type=float, help="with --positions: how many times longer the context becomes"
    )


def add_sweep_argument(parser: argparse.ArgumentParser) -> None:
    """Add --sweep, for commands that train runs."""
    parser.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="key.sub=A,B",
        help="one run for each of these values; repeat the option for all combinations with others",
    )


def named_model(args: argparse.Namespace, run: str) -> "NamedModel":
    """The model of this run as the arguments say, not loaded yet."""
    if args.factor is not None and args.positions == "none":
        raise ValueError(
            f"--factor: found {args.factor:g} with --positions none, wanted linear or dynamic_ntk"
        )
    if args.factor is None and args.positions != "none":
        raise ValueError(f"--factor: found none with --positions {args.positions}, wanted a number")
    from longhaul.pipeline.runs.trained_model import NamedModel

    return NamedModel(run, args.positions, 1.0 if args.factor is None else args.factor)


def parse_contexts(text: str | None, option: str = "--contexts") -> list[int] | None:
    """The numbers of tokens in an option's "N,N,...", in the given order; None for None."""
    if text is None:
        return None
    if not all(number.isdecimal() and int(number) for number in text.split(",")):
        raise ValueError(f"{option}: found {text!r}, wanted tokens, such as 1024,65536")
    return [int(number) for number in text.split(",")]
