"""`longhaul export`: write a checkpoint as a folder that transformers loads without longhaul."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="a run folder, or one of its checkpoints")
    parser.add_argument(
        "destination", metavar="DST", help="a folder that does not exist, or is empty"
    )


def main(args: argparse.Namespace) -> int:
    from longhaul.pipeline.exporting.folder import export

    code = 0
    for file in export(args.run, args.destination):
        if file.suffix == ".py":
            code += 1
        else:
            print(f"written: {file}")
    print(f"written: {args.destination}/*.py, {code} files: the code of the model")
    return 0
