"""`longhaul data`: what a folder of shards holds, and where the sample of a run comes from."""

import argparse
import json
from pathlib import Path

from longhaul.pipeline.arguments import check_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        metavar="DST",
        help="a folder of shards, or one with several of them, or a manifest's path or URL; with "
        "--sample a YAML file, a preset, or the folder of a run",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key.sub=value", help="with --sample: overrides the file"
    )
    parser.add_argument(
        "--sample",
        type=int,
        metavar="N",
        help="instead, where sample N of the run's training comes from, counted from 0",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write it as JSON")


def main(args: argparse.Namespace) -> int:
    if args.json is not None and not args.json.parent.is_dir():
        raise ValueError(f"--json: found no folder {args.json.parent}, wanted one for the file")
    if args.sample is None:
        if args.overrides:
            raise ValueError(f"found {args.overrides[0]!r} without --sample, wanted DST alone")
        from longhaul.datamodules.corpus import find_corpora

        corpora = find_corpora(args.source)
        if not corpora:
            raise ValueError(
                f"{args.source}: found no manifest.json there, wanted a folder of shards"
            )
        # After the source is found, since this import takes seconds.
        from longhaul.pipeline.preparation.inspection import inspect

        found = {"version": 1, "corpora": inspect(corpora)}
    else:
        run = Path(args.source, "config.yaml")
        source = str(run) if run.is_file() else args.source
        check_config(source, args.overrides)
        from longhaul.pipeline.preparation.tracing import print_trace, trace
        from longhaul.pipeline.runs.folder import load_run

        found = {"version": 1, **trace(load_run(source, args.overrides), args.sample)}
        print_trace(found)
    if args.json is not None:
        from longhaul.datamodules.files.atomic import write_atomically

        write_atomically(args.json, json.dumps(found, indent=1) + "\n")
    return 0
