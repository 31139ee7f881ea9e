"""`longhaul import`: make a run of a folder in transformers' layout."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", metavar="FOLDER", help="config.json, safetensors and a tokenizer, as saved"
    )
    parser.add_argument(
        "destination", metavar="DST", help="a folder that does not exist, or is empty"
    )


def main(args: argparse.Namespace) -> int:
    from longhaul.pipeline.importing.folder import import_folder

    print(f"written: {import_folder(args.source, args.destination)}")
    return 0
