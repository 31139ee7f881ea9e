"""`longhaul bench`: speeds as ratios against a peer measured in the same run."""

import argparse

from longhaul.pipeline import bench_data, bench_kernels


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=["kernels", "data"])


def main(args: argparse.Namespace) -> int:
    if args.what == "kernels":
        bench_kernels.run()
    else:
        bench_data.run()
    return 0
