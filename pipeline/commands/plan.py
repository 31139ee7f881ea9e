"""`longhaul plan`: what a model is made of and costs, from its config alone."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="a YAML file, or a preset such as run/demo.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="wins over the file")
    parser.add_argument(
        "--kinds", help="comma-separated, in place of model.attention.kind, such as softmax,sympow"
    )
    parser.add_argument(
        "--contexts", help="comma-separated, in place of data.context, such as 1024,65536 tokens"
    )
    parser.add_argument(
        "--gpus", type=int, help="ranks, in place of trainer.devices and trainer.nodes"
    )
    parser.add_argument(
        "--device", help="also plan memory and communication on h100, h200, a100, b200, l40s, ..."
    )


def main(args: argparse.Namespace) -> int:
    from longhaul.pipeline.planning.tables import print_plan

    print_plan(
        args.config,
        args.overrides,
        kinds=None if args.kinds is None else args.kinds.split(","),
        contexts=None if args.contexts is None else _contexts(args.contexts),
        gpus=args.gpus,
        device=args.device,
    )
    return 0


def _contexts(text: str) -> list[int]:
    contexts = [int(part) if part.isdecimal() else 0 for part in text.split(",")]
    if min(contexts) < 1:
        raise ValueError(f"--contexts: found {text!r}, wanted tokens, such as 1024,65536")
    return contexts
