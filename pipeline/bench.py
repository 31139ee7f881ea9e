"""`longhaul bench`: kinds, kernels and readers beside their peers, measured in the same run."""

import argparse

from longhaul.pipeline import bench_data, bench_kernels, bench_train


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parts = parser.add_subparsers(dest="what", required=True)
    parts.add_parser("kernels", help="power attention beside fused softmax attention")
    parts.add_parser("data", help="our token stream beside stock webdataset")
    train = parts.add_parser("train", help="the trainer's cost, and every kind under one budget")
    bench_train.add_arguments(train)


def main(args: argparse.Namespace) -> int:
    if args.what == "kernels":
        bench_kernels.run()
    elif args.what == "data":
        bench_data.run()
    else:
        bench_train.run(args)
    return 0
