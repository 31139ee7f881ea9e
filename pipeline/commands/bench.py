"""`longhaul bench`: kinds, kernels and readers beside their peers, measured in the same run."""

import argparse

_CONFIG = "run/demo.yaml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parts = parser.add_subparsers(dest="what", required=True)
    parts.add_parser("kernels", help="power attention beside fused softmax attention")
    parts.add_parser("data", help="our token stream beside stock webdataset")
    train = parts.add_parser("train", help="the trainer's cost, and every kind under one budget")
    _add_train_arguments(train)


def _add_train_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "given",
        nargs="*",
        metavar="[CONFIG] key.sub=value",
        help=f"a YAML file or preset, by default {_CONFIG}, and values that win over it",
    )
    parser.add_argument(
        "--kinds",
        nargs="*",
        metavar="KIND[:option=value,...]",
        help="rows, such as softmax cartan:generator=product,bilinear=false; default: all kinds; "
        "with none there is no table, only what the trainer and checkpoints cost",
    )
    parser.add_argument(
        "--updates", type=int, default=200, help="of every row; default %(default)s"
    )


def main(args: argparse.Namespace) -> int:
    if args.what == "kernels":
        from longhaul.pipeline.benchmarks import kernels

        kernels.run()
    elif args.what == "data":
        from longhaul.pipeline.benchmarks import data

        data.run()
    else:
        from longhaul.pipeline.benchmarks import kinds

        has_config = bool(args.given) and "=" not in args.given[0]
        path = args.given[0] if has_config else _CONFIG
        kinds.run(path, args.given[1:] if has_config else args.given, args.kinds, args.updates)
    return 0
