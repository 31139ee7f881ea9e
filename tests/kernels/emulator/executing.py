"""Execute calls of power attention in the emulator, and compare them with float64.

    python tests/kernels/emulator/executing.py SUITE [--only TEXT] [--results FILE] [--table FILE]

executes the calls of `make test-all` ("wide"), or "all", and prints a line for each call. Results
are kept in a file of one JSON object a line, from which a later start continues; the table is
written from them.
Exits with status 1 if a result is wrong or an access is a fault.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from catalogue import Run, runs_of
from launching import emulating
from memories import FaultError

from longhaul.kernels.common.triton.launch import configuration
from longhaul.kernels.power.verify.cases import rounding_faults
from longhaul.kernels.testing import compare, poisoned_memory


def execute(run: Run) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A record of what was launched, every tensor's error and what is wrong; and the tensors."""
    started = time.monotonic()
    case = run.case
    inputs = case.inputs(torch.device("cpu"))
    oracle = case.expected(inputs, torch.float64)
    definition = case.expected(inputs, case.torch_dtype)
    record: dict[str, Any] = {"name": run.name, "dtype": case.dtype, "target": run.target}
    faults: list[str] = []
    errors: dict[str, float] = {}
    with emulating(run.target) as launches, configuration(run.candidate), poisoned_memory():
        try:
            if run.form == "step":
                actual = case.steps(inputs, "triton")
            else:
                actual = case.run(
                    inputs,
                    case.torch_dtype,
                    form=run.form,
                    chunk_size=run.chunk_size if run.form == "chunked" else None,
                    backend="triton",
                )
        except FaultError as error:
            actual = {}
            faults.append(str(error))
    for name, x in actual.items():
        found = compare(
            x, oracle[name], definition[name], multiple=case.multiple, dtype=case.torch_dtype
        )
        errors[name] = float(f"{found.norm_error:.2g}")
        if found.fault:
            faults.append(f"{name}: {found.fault}")
    if run.form == "step" and case.has_bfloat16_state and actual:
        faults += rounding_faults(actual["final kv"], oracle["final kv"])
    record |= {
        "launches": sorted({(launch.kernel, launch.config) for launch in launches}),
        "errors": errors,
        "faults": faults,
        "seconds": round(time.monotonic() - started, 1),
    }
    return record, actual


def table(records: list[dict[str, Any]]) -> str:
    """Markdown: a row for each kernel and configuration, with the largest error by dtype."""
    calls: dict[tuple[str, str, str], dict[str, list[float]]] = defaultdict(dict)
    for record in records:
        largest = max(record["errors"].values(), default=float("nan"))
        for kernel, config in record["launches"]:
            row = calls[kernel, config, record["dtype"]]
            row.setdefault(record["target"], []).append(largest)
    targets = sorted({record["target"] for record in records})
    lines = [
        "| kernel | configuration | dtype | " + " | ".join(targets) + " |",
        "|---|---|---|" + "---:|" * len(targets),
    ]
    for (kernel, config, dtype), row in sorted(calls.items()):
        cells = [
            f"{max(row[target]):.1e} ({len(row[target])})" if target in row else ""
            for target in targets
        ]
        lines.append(f"| `{kernel}` | {config} | {dtype} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


_HEAD = """\
# What was executed

Written by `make soak` (tests/kernels/emulator/executing.py), which runs the compiled PTX of every
kernel in the emulator. An error is the largest |x - oracle| / |oracle| of any output or gradient of
the calls that launched the kernel; their number is in brackets. {summary}

"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suite", choices=("wide", "all"))
    parser.add_argument("--only", default="")
    parser.add_argument("--results", type=Path)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--save", type=Path, help="a file for the tensors of the last call")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    records: list[dict[str, Any]] = []
    if options.results and options.results.exists():
        records = [json.loads(line) for line in options.results.read_text().splitlines()]
    done = {record["name"] for record in records}
    for run in runs_of(options.suite):
        if options.only not in run.name or run.name in done:
            continue
        record, tensors = execute(run)
        if options.save:
            torch.save(tensors, options.save)
        records.append(record)
        print(json.dumps(record), flush=True)
        if options.results:
            with options.results.open("a") as file:
                file.write(json.dumps(record) + "\n")
    wrong = [record["name"] for record in records if record["faults"]]
    if options.table:
        summary = f"{len(records)} calls, {len(wrong)} of them wrong."
        options.table.write_text(_HEAD.format(summary=summary) + table(records) + "\n")
    for name in wrong:
        print(f"wrong: {name}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
