"""`longhaul bench`: kernels, data readers and training, compared with peers in the same run."""

import argparse

from longhaul.pipeline.commands.arguments import check_config

_CONFIG = "run/demo.yaml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    benchmarks = parser.add_subparsers(dest="what", required=True)
    benchmarks.add_parser("kernels", help="power attention against fused softmax attention")
    benchmarks.add_parser("data", help="longhaul's token stream against stock webdataset")
    train = benchmarks.add_parser(
        "train", help="the trainer's cost, and every kind trained with the same budget"
    )
    train.add_argument(
        "config_and_overrides",
        nargs="*",
        metavar="[CONFIG] key.sub=value",
        help=f"a YAML file or preset, by default {_CONFIG}, and values that override it",
    )
    train.add_argument(
        "--kinds",
        nargs="*",
        metavar="KIND[:option=value,...]",
        help="rows of the table, such as softmax cartan:generator=product,bilinear=false; default: "
        "all kinds; --kinds without a KIND measures only the trainer and checkpoints",
    )
    train.add_argument(
        "--updates",
        type=int,
        default=200,
        help="updates that each row is trained for; default %(default)s",
    )


def main(args: argparse.Namespace) -> int:
    if args.what == "kernels":
        from longhaul.pipeline.benchmarks import kernels

        kernels.run()
    elif args.what == "data":
        from longhaul.pipeline.benchmarks import data

        data.run()
    else:
        path, overrides = _CONFIG, args.config_and_overrides
        if overrides and "=" not in overrides[0]:
            path, *overrides = overrides
        check_config(path, overrides, [_of_kind(text) for text in args.kinds or ("",)])
        from longhaul.pipeline.benchmarks import kinds

        kinds.run(path, overrides, args.kinds, args.updates)
    return 0


def _of_kind(text: str) -> list[str]:
    """The overrides that a row such as cartan:generator=product stands for."""
    kind, _, options = text.partition(":")
    given = [f"kind={kind}" if kind else "", *options.split(",")]
    return [f"model.attention.{one}" for one in given if one]
