"""`longhaul import`: make a run of a folder in transformers' layout."""

import argparse
from pathlib import Path

from longhaul.pipeline.system.atomic_folder import new_or_empty_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", metavar="FOLDER", help="config.json, safetensors and a tokenizer, as saved"
    )
    parser.add_argument(
        "destination", metavar="DST", help="a folder that does not exist, or is empty"
    )


def main(args: argparse.Namespace) -> int:
    if not Path(args.source, "config.json").is_file():
        raise ValueError(
            f"{args.source}: found no config.json, wanted a folder in transformers' layout"
        )
    new_or_empty_folder(args.destination)
    # After the paths are checked, since this import takes seconds.
    from longhaul.pipeline.importing.folder import import_folder

    print(f"written: {import_folder(args.source, args.destination)}")
    return 0
