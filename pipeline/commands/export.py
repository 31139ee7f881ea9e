"""`longhaul export`: write a checkpoint as a folder that transformers loads without longhaul."""

import argparse
import json
from pathlib import Path

from longhaul.pipeline.system.atomic_folder import new_or_empty_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="a run folder, or one of its checkpoints")
    parser.add_argument(
        "destination", metavar="DST", help="a folder that does not exist, or is empty"
    )
    parser.add_argument(
        "--as",
        dest="form",
        choices=("auto", "longhaul"),
        default="auto",
        help="auto: as an architecture of transformers where one expresses the model; longhaul: "
        "with its own code; default %(default)s",
    )


def main(args: argparse.Namespace) -> int:
    from longhaul.configs.run_folders import named_run

    named_run(args.run)
    new_or_empty_folder(args.destination)
    # After the paths are checked, since this import takes seconds.
    from longhaul.pipeline.exporting.folder import export

    code = 0
    for file in export(args.run, args.destination, form=args.form):
        if file.suffix == ".py":
            code += 1
        else:
            print(f"written: {file}")
    (name,) = json.loads(Path(args.destination, "config.json").read_bytes())["architectures"]
    is_own = name == "LonghaulForCausalLM"
    if code:
        whose = "model" if is_own else "tokenizer"
        print(f"written: {args.destination}/*.py, {code} files: the code of the {whose}")
    if not is_own:
        print(f"transformers loads it as {name}")
    return 0
