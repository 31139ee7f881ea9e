"""Arguments that several commands have."""

import argparse
from collections.abc import Iterable, Sequence
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


def add_config_arguments(parser: argparse.ArgumentParser, *, is_required: bool = True) -> None:
    """Add CONFIG and `key.sub=value`."""
    parser.add_argument(
        "config",
        nargs=None if is_required else "?",
        help="a YAML file, or a preset such as run/demo.yaml",
    )
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="overrides the file")


def check_config(
    config: str, overrides: Sequence[str], combinations: Iterable[Sequence[str]] = ((),)
) -> None:
    """Refuse keys and values that are wrong, before torch is imported, which takes seconds.

    Args:
        config, overrides: as in `load_run`.
        combinations: further overrides of each of several runs.
    """
    from longhaul.configs.values import read_values

    for further in combinations:
        read_values(config, [*overrides, *further])


def sweep_axes(args: argparse.Namespace) -> list[str]:
    """The axes of --sweep and --seeds, checked as in `check_config`; empty for a single run."""
    from longhaul.configs.values import read_values
    from longhaul.pipeline.runs.axes import combinations

    axes = list(args.sweep)
    if args.seeds is not None:
        if args.seeds < 1:
            raise ValueError(f"--seeds: found {args.seeds}, wanted 1 or more")
        if any("trainer.seed" in axis.partition("=")[0].split(",") for axis in axes):
            raise ValueError("--seeds: found with trainer.seed in --sweep, wanted one of them")
        first = read_values(args.config, args.overrides).tree.get("trainer", {}).get("seed", 0)
        axes.append("trainer.seed=" + ",".join(map(str, range(first, first + args.seeds))))
    check_config(args.config, args.overrides, [*combinations(axes)])
    return axes


def add_sweep_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --sweep and --seeds, for commands that train runs."""
    parser.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="key.sub=A,B",
        help="one run for each of these values; repeat the option for all combinations with "
        "others; keys that vary together: key.sub,other=A:1,B:2",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        metavar="N",
        help="N runs of each, with trainer.seed and the seeds after it; more of them later add the "
        "missing ones",
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
    from longhaul.configs.counts import parse_count

    try:
        numbers = [parse_count(number, option) for number in text.split(",")]
    except ValueError:
        numbers = [0]
    if not all(numbers):
        raise ValueError(f"{option}: found {text!r}, wanted tokens, such as 1024,64k")
    return numbers
