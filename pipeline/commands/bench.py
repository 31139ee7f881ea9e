"""`longhaul bench`: kernels, data readers and training, compared with peers in the same run."""

import argparse

from longhaul.pipeline.arguments import check_config

_CONFIG = "run/demo.yaml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    benchmarks = parser.add_subparsers(dest="what", required=True)
    benchmarks.add_parser("kernels", help="power attention against fused softmax attention")
    benchmarks.add_parser("delta", help="the delta rule against plain torch with autograd")
    benchmarks.add_parser("data", help="longhaul's token stream against stock webdataset")
    masks = benchmarks.add_parser(
        "masks", help="updates with documents that do not see each other, against whole rows"
    )
    train = benchmarks.add_parser(
        "train", help="the trainer's cost, and every kind trained with the same budget"
    )
    for parser in (masks, train):
        parser.add_argument(
            "config_and_overrides",
            nargs="*",
            metavar="[CONFIG] key.sub=value",
            help=f"a YAML file or preset, by default {_CONFIG}, and values that override it",
        )
    rows = "rows of the table, such as softmax cartan:generator=product,bilinear=false; default: "
    masks.add_argument(
        "--kinds", nargs="+", metavar="KIND[:option=value,...]", help=f"{rows}all kinds"
    )
    train.add_argument(
        "--kinds",
        nargs="*",
        metavar="KIND[:option=value,...]",
        help=f"{rows}all kinds; --kinds without a KIND measures only the trainer and checkpoints",
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
    elif args.what == "delta":
        from longhaul.pipeline.benchmarks import delta

        delta.run()
    elif args.what == "data":
        from longhaul.pipeline.benchmarks import data

        data.run()
    else:
        path, overrides = _CONFIG, args.config_and_overrides
        if overrides and "=" not in overrides[0]:
            path, *overrides = overrides
        check_config(path, overrides, [_of_kind(text) for text in args.kinds or ("",)])
        if args.what == "masks":
            _bench_masks(path, overrides, args.kinds)
            return 0
        from longhaul.pipeline.benchmarks import kinds

        kinds.run(path, overrides, args.kinds, args.updates)
    return 0


def _bench_masks(path: str, overrides: list[str], kinds: list[str] | None) -> None:
    from longhaul.configs import load_run_config
    from longhaul.modules.attention import registered_variants
    from longhaul.pipeline.benchmarks import masks

    rows = registered_variants() if kinds is None else kinds
    masks.run({row: load_run_config(path, [*overrides, *_of_kind(row)]) for row in rows})


def _of_kind(text: str) -> list[str]:
    """The overrides that a row such as cartan:generator=product stands for."""
    kind, _, options = text.partition(":")
    given = [f"kind={kind}" if kind else "", *options.split(",")]
    return [f"model.attention.{one}" for one in given if one]
