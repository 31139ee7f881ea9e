"""Everything that needs a GPU, in one run: are the kernels correct, and how fast are they?

    python -m longhaul.kernels.verify [--out verify.json]

checks outputs and gradients against float64, then times this op and its peers, within 8 minutes,
prints a summary, and writes one JSON: device, versions, shapes, errors, times, TFLOP/s, memory,
kernels, targets. The exit status is 1 if a check failed or did not run; a missed target is no
failure.

On a rented GPU with CUDA builds of torch and triton, in a checkout that has a folder of wheels:

    pip install --no-deps --no-index --find-links wheels einops jaxtyping jinja2 markupsafe \\
        wadler-lindig fla-core retention && pip install --no-deps --no-build-isolation . \\
        && python -m longhaul.kernels.verify --out verify.json

`pip download --no-deps -d wheels fla-core==0.6.0 retention==1.0.7 einops …` fills that folder.
fla-core is the part of flash-linear-attention that holds its kernels; retention needs jinja2
without declaring it. Leave `vidrial` out: without it retention runs on Triton, with it retention
clones a repository and compiles CUDA on import. The report names each peer that is missing.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch

from longhaul.kernels.verify.benchmark import Sizes
from longhaul.kernels.verify.report import run, summary

_MOST_PROCESSES = 12


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m longhaul.kernels.verify",
        description="Check and time the kernels on a GPU, within 8 minutes.",
    )
    parser.add_argument("--out", type=Path, default=Path("verify.json"), help="the report, as JSON")
    out = parser.parse_args(arguments).out
    if not torch.cuda.is_available():
        print("verify: found no CUDA device, wanted one", file=sys.stderr)
        return 2
    num_processes = min(_MOST_PROCESSES, os.cpu_count() or 1)
    report = run("cuda", Sizes(), num_processes=num_processes, out=out)
    print(summary(report))
    print(f"report: {out}")
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
