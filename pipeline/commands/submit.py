"""`longhaul submit`: queue a run, or a sweep of runs, with Slurm."""

import argparse
from pathlib import Path

from longhaul.pipeline.arguments import (
    add_config_arguments,
    add_sweep_arguments,
    sweep_axes,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    add_sweep_arguments(parser)
    parser.add_argument(
        "--throttle",
        type=int,
        default=4,
        help="most runs of a sweep, or tasks of --prepare, at the same time; default %(default)s",
    )
    parser.add_argument(
        "--chain",
        type=int,
        default=0,
        metavar="N",
        help="queue N more jobs; each continues the run if the job before did not finish it",
    )
    parser.add_argument("--after", metavar="JOB", help="start when this job has ended")
    parser.add_argument("--dry-run", action="store_true", help="print the script, queue nothing")
    parser.add_argument(
        "--tasks",
        type=int,
        default=8,
        metavar="N",
        help="parts that --prepare is divided into; default %(default)s",
    )
    parser.add_argument(
        "--prepare",
        nargs=argparse.REMAINDER,
        metavar="text SRC ... DST ...",
        help="train nothing, but prepare data as `longhaul prepare` does with all that follows: an "
        "array of jobs tokenizes, and one that waits for it packs; CONFIG says for which cluster",
    )


def main(args: argparse.Namespace) -> int:
    if args.chain < 0:
        raise ValueError(f"--chain: found {args.chain}, wanted 0 or more")
    if args.throttle < 1:
        raise ValueError(f"--throttle: found {args.throttle}, wanted 1 or more")
    if args.tasks < 1:
        raise ValueError(f"--tasks: found {args.tasks}, wanted 1 or more")
    axes = sweep_axes(args)
    if axes and args.chain:
        raise ValueError("--chain: found with --sweep or --seeds, wanted one of them")
    if args.prepare is not None and (axes or args.chain):
        raise ValueError("--prepare: found with --sweep, --seeds or --chain, wanted it alone")
    if args.prepare is not None:
        _check_prepare(args.prepare)
    from longhaul.pipeline.cluster.submission import submit, submit_prepare, submit_sweep

    config = (args.config, args.overrides)
    queueing = {"after": args.after, "dry_run": args.dry_run}
    if args.prepare is not None:
        submit_prepare(*config, args.prepare, tasks=args.tasks, throttle=args.throttle, **queueing)
    elif axes:
        submit_sweep(*config, axes, throttle=args.throttle, **queueing)
    else:
        submit(*config, chain=args.chain, **queueing)
    return 0


def _check_prepare(words: list[str]) -> None:
    """Raise where `longhaul prepare` would refuse these words, or could not be divided."""
    from longhaul.datamodules.preparation.source_files import STANDARD_LIBRARY
    from longhaul.datamodules.urls import MissingInputError
    from longhaul.pipeline.commands import prepare

    parser = argparse.ArgumentParser(prog="longhaul submit CONFIG --prepare")
    prepare.add_arguments(parser)
    args = parser.parse_args(words)
    if args.corpus not in ("text", "tokens"):
        raise ValueError(
            f"--prepare: found {args.corpus}, wanted text or tokens, which can be divided"
        )
    if args.part is not None:
        raise ValueError("--prepare: found --part, wanted --tasks before --prepare")
    sources, _, _ = prepare.sources_and_options(args)
    for source in sources:
        # Of Megatron's files the common prefix may be named.
        exists = Path(source).exists() or Path(f"{source}.bin").exists()
        if source != STANDARD_LIBRARY and not exists:
            raise MissingInputError(f"{source}: no such file or folder")
