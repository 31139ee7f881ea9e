"""`longhaul plan`: the parameters, FLOPs, states and memory of a model, from its config alone."""

import argparse

from longhaul.pipeline.arguments import add_config_arguments, check_config, parse_contexts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, is_required=False)
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
        "--states",
        action="store_true",
        help="instead, the states of GPT-2's four sizes at each degree, as in the sympow paper",
    )
    parser.add_argument(
        "--device", help="also plan memory and communication on h100, h200, a100, b200, l40s, ..."
    )


def main(args: argparse.Namespace) -> int:
    given = (args.config, args.kinds, args.contexts, args.gpus, args.device)
    if args.states and any(one is not None for one in given):
        raise ValueError("--states: found it with a config or other options, wanted it alone")
    if args.config is None and not args.states:
        raise ValueError("config: found none, wanted CONFIG, or --states")
    kinds = None if args.kinds is None else args.kinds.split(",")
    if kinds is not None and not all(kinds):
        raise ValueError(f"--kinds: found {args.kinds!r}, wanted kinds, such as softmax,sympow")
    contexts = parse_contexts(args.contexts)
    if args.config is not None:
        check_config(
            args.config,
            args.overrides,
            [[f"model.attention.kind={kind}"] for kind in kinds] if kinds else ((),),
        )
    if args.states:
        from longhaul.pipeline.planning.states import print_states

        print_states()
        return 0
    from longhaul.pipeline.planning.tables import print_plan

    print_plan(
        args.config,
        args.overrides,
        kinds=kinds,
        contexts=contexts,
        gpus=args.gpus,
        device=args.device,
    )
    return 0
