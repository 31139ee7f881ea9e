"""`longhaul submit`: queue a run, or a sweep of runs, with Slurm."""

import argparse

from longhaul.pipeline.commands.arguments import (
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
        help="most runs of a sweep at the same time; default %(default)s",
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


def main(args: argparse.Namespace) -> int:
    if args.chain < 0:
        raise ValueError(f"--chain: found {args.chain}, wanted 0 or more")
    if args.throttle < 1:
        raise ValueError(f"--throttle: found {args.throttle}, wanted 1 or more")
    axes = sweep_axes(args)
    if axes and args.chain:
        raise ValueError("--chain: found with --sweep or --seeds, wanted one of them")
    from longhaul.pipeline.cluster.submission import submit, submit_sweep

    config = (args.config, args.overrides)
    queueing = {"after": args.after, "dry_run": args.dry_run}
    if axes:
        submit_sweep(*config, axes, throttle=args.throttle, **queueing)
    else:
        submit(*config, chain=args.chain, **queueing)
    return 0
