"""`longhaul submit`: queue a run, or a sweep of runs, with Slurm."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="a YAML file, or a preset such as run/demo.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="wins over the file")
    parser.add_argument(
        "--sweep",
        nargs="+",
        default=[],
        metavar="key.sub=A,B",
        help="a run for each combination of these values, in one array of jobs",
    )
    parser.add_argument(
        "--throttle", type=int, default=4, help="runs of a sweep at a time; default %(default)s"
    )
    parser.add_argument(
        "--chain",
        type=int,
        default=0,
        metavar="N",
        help="queue N follow-ups, each of which goes on if the one before did not finish the run",
    )
    parser.add_argument("--after", metavar="JOB", help="begin when that job has ended")
    parser.add_argument("--dry-run", action="store_true", help="print the script, queue nothing")


def main(args: argparse.Namespace) -> int:
    if args.chain < 0:
        raise ValueError(f"--chain: found {args.chain}, wanted 0 or more")
    if args.throttle < 1:
        raise ValueError(f"--throttle: found {args.throttle}, wanted 1 or more")
    if args.sweep and args.chain:
        raise ValueError("--chain: found with --sweep, wanted one of them")
    from longhaul.pipeline.cluster.submission import submit, submit_sweep

    given = (args.config, args.overrides)
    if args.sweep:
        submit_sweep(
            *given, args.sweep, throttle=args.throttle, after=args.after, dry_run=args.dry_run
        )
    else:
        submit(*given, chain=args.chain, after=args.after, dry_run=args.dry_run)
    return 0
