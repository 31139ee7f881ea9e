"""`longhaul plan`: the parameters, FLOPs, states and memory of a model, from its config alone."""

import argparse

from longhaul.pipeline.commands.arguments import parse_contexts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="a YAML file, or a preset such as run/demo.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="overrides the file")
    parser.add_argument(
        "--kinds", help="kinds to compare in place of model.attention.kind, such as softmax,sympow"
    )
    parser.add_argument(
        "--contexts",
        help="contexts to compare in place of data.context, in tokens, such as 1024,65536",
    )
    parser.add_argument(
        "--gpus", type=int, help="number of ranks in place of trainer.devices and trainer.nodes"
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
        contexts=parse_contexts(args.contexts),
        gpus=args.gpus,
        device=args.device,
    )
    return 0
