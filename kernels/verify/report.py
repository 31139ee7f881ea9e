"""One report of the kernels on one device: all checks, all timings, and the targets they meet."""

from __future__ import annotations

import json
import platform
import subprocess
import time
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from longhaul.kernels.verify.benchmark import (
    Compilation,
    Sizes,
    Task,
    compilations_of,
    measure,
    tasks_of,
    untimed_tuning,
)
from longhaul.kernels.verify.cases import Case, check, core_cases, extreme_cases, shrunk
from longhaul.kernels.verify.peers import RETENTION_CHUNKS, own_backend
from longhaul.kernels.verify.processes import Outcome, run_tasks

# Seconds from the start at which checks and compilation end, and at which everything ends.
_CHECKED_BY = 250.0
_DONE_BY = 465.0
_CROSSOVER_BY = 8192  # tokens
_PACKAGES = ("torch", "triton", "longhaul", "fla-core", "retention")


def run(
    device: str, sizes: Sizes, *, num_processes: int, out: Path | None = None
) -> dict[str, Any]:
    """The whole report. With `num_processes` 0 everything runs in this process.

    Args:
        num_processes: processes that check and compile at a time. Timing always uses one.
        out: file for the report. It is written after the checks, and again with the timings.
    """
    started = time.monotonic()
    cases = [*core_cases(), *extreme_cases(own_backend(torch.device(device)))]
    cases = [shrunk(case, sizes.case_tokens, sizes.case_width) for case in cases]
    tasks = tasks_of(sizes, device)
    # First the checks of the dtype used for training, then compilations, which take longest.
    first = [case for case in cases if case.dtype == "bfloat16"]
    jobs: list[Case | Compilation] = [*first]
    if torch.device(device).type == "cuda":
        jobs += compilations_of(tasks)
    jobs += [case for case in cases if case not in first]
    outcomes = run_tasks(
        partial(_check_or_compile, device),
        jobs,
        num_processes=num_processes,
        deadline=started + _CHECKED_BY,
    )
    checks = [record for pair in zip(jobs, outcomes, strict=True) for record in _checks(*pair)]
    report: dict[str, Any] = {
        "passed": not any(record["faults"] for record in checks),
        "device": _describe(device),
        "versions": _versions(),
        "checks": checks,
        "compilation_problems": [
            f"{job.task.implementation}: {outcome.problem}"
            for job, outcome in zip(jobs, outcomes, strict=True)
            if isinstance(job, Compilation) and outcome.problem
        ],
        "seconds_of_checks": round(time.monotonic() - started, 1),
    }
    _write(report, out)
    outcomes = run_tasks(
        measure, tasks, num_processes=min(num_processes, 1), deadline=started + _DONE_BY
    )
    measurements = [_measurement(*pair) for pair in zip(tasks, outcomes, strict=True)]
    report |= {"targets": targets_of(measurements), "measurements": measurements}
    report["seconds"] = round(time.monotonic() - started, 1)
    _write(report, out)
    return report


def _check_or_compile(device: str, job: Case | Compilation) -> list[dict[str, Any]]:
    if isinstance(job, Compilation):
        job.run()
        return []
    with untimed_tuning():
        return check(job, torch.device(device), own_backend(torch.device(device)))


def _checks(job: Case | Compilation, outcome: Outcome) -> list[dict[str, Any]]:
    """Records of a case, one per form, even if the case did not finish."""
    if isinstance(job, Compilation):
        return []
    if outcome.problem is None:
        records: list[dict[str, Any]] = outcome.result
        return records
    empty: dict[str, Any] = {"tensors": {}, "faults": [outcome.problem], "seconds": None}
    return [asdict(job) | {"form": form} | empty for form in job.forms]


def _measurement(task: Task, outcome: Outcome) -> dict[str, Any]:
    shape = asdict(task.shape) | {"dtype": str(task.shape.dtype).removeprefix("torch.")}
    if task.what in ("matmul", "copy"):
        shape = {"size": task.size}
    problem = outcome.problem
    record = {
        "what": task.what,
        "row": task.row,
        "implementation": task.implementation,
        "shape": shape,
    }
    return record | {"problem": problem, "result": outcome.result}


def targets_of(measurements: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each performance target beside the measured value; None where a measurement is missing."""

    def get(number: str, row: str, implementation: str = "longhaul") -> float | None:
        found = [
            one["result"].get(number)
            for one in measurements
            if one["row"] == row
            and one["implementation"] == implementation
            and one["what"] != "profile"
            and one["result"]
        ]
        return float(found[0]) if found and found[0] is not None else None

    def ratio(above: float | None, below: float | None) -> float | None:
        return above / below if above is not None and below else None

    def faster(row: str, implementation: str, number: str = "forward_backward_ms") -> float | None:
        return ratio(get(number, row, implementation), get(number, row))

    wide = "degree 2, K 64"
    retention = [faster(wide, f"retention, chunk {C}") for C in RETENTION_CHUNKS]
    rate = get("forward_backward_tflops", wide)
    lines = {
        f"{wide}: times faster than SDPA-flash": (faster(wide, "sdpa flash"), 8.0),
        f"{wide}: times faster than retention at its best chunk": (
            min((x for x in retention if x is not None), default=None),
            2.5,
        ),
        "degree 2, K 32: times faster than SDPA-flash": (
            faster("degree 2, K 32", "sdpa flash"),
            12.0,
        ),
        "degree 1, K 64: times faster than chunk_simple_gla": (
            faster("degree 1, K 64", "chunk_simple_gla"),
            1.0,
        ),
        f"{wide}: fraction of the matmul's rate": (ratio(rate, get("tflops", "matmul")), 0.3),
        "attention form: times faster than SDPA-flash": (
            faster("attention form", "sdpa flash"),
            0.7,
        ),
        "decoding: times faster than SDPA, as a graph": (
            faster("decoding, as a graph", "sdpa flash", "ms"),
            50.0,
        ),
        "decoding: times faster than SDPA": (faster("decoding", "sdpa flash", "ms"), 50.0),
        f"{wide}: memory allowed over memory used": (
            ratio(get("allowed_bytes", wide), get("peak_bytes", wide)),
            1.0,
        ),
    }
    targets = [
        {"name": name, "value": x, "target": target, "met": None if x is None else x >= target}
        for name, (x, target) in lines.items()
    ]
    crossover, met = _crossover(measurements)
    name = "degree 2, K 64: tokens from which it is faster than SDPA-flash, at most"
    return [*targets, {"name": name, "value": crossover, "target": _CROSSOVER_BY, "met": met}]


def _crossover(measurements: list[dict[str, Any]]) -> tuple[int | None, bool | None]:
    """The shortest length from which this op is faster than SDPA, and if it meets the target."""
    times: dict[int, dict[str, float]] = {}
    for one in measurements:
        if one["row"].startswith("T ") and one["result"]:
            by_name = times.setdefault(one["shape"]["T"], {})
            by_name[one["implementation"]] = one["result"]["forward_backward_ms"]
    complete = {T: both for T, both in sorted(times.items()) if len(both) == 2}
    if not complete:
        return None, None
    crossover = None
    for T in reversed(complete):
        if complete[T]["longhaul"] > complete[T]["sdpa flash"]:
            break
        crossover = T
    return crossover, crossover is not None and crossover <= _CROSSOVER_BY


def _describe(device: str) -> dict[str, Any]:
    if torch.device(device).type != "cuda":
        return {"name": platform.processor() or device, "type": device}
    found = torch.cuda.get_device_properties(device)
    return {
        "name": found.name,
        "type": device,
        "capability": f"{found.major}.{found.minor}",
        "multiprocessors": found.multi_processor_count,
        "memory_bytes": found.total_memory,
    }


def _versions() -> dict[str, str | None]:
    """Versions of all packages involved; None where one is not installed."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    versions["cuda"] = torch.version.cuda
    for package in _PACKAGES:
        versions[package] = None
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    versions["commit"] = None
    with suppress(OSError, subprocess.SubprocessError):
        versions["commit"] = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    return versions


def _write(report: dict[str, Any], out: Path | None) -> None:
    if out is not None:
        out.write_text(json.dumps(report, indent=1) + "\n")


def summary(report: dict[str, Any]) -> str:
    """A short text for people: faults, times, targets."""
    checks = report["checks"]
    faulty = [one for one in checks if one["faults"]]
    lines = [
        f"{report['device']['name']}: {len(checks) - len(faulty)} of {len(checks)} checks pass"
    ]
    lines += [
        f"  {one['name']}, {one['dtype']}, {one['form']}: {one['faults'][0]}" for one in faulty
    ]
    for one in report["measurements"]:
        result = one["result"] or {}
        times = {key: x for key, x in result.items() if isinstance(x, float) and x is not None}
        text = "  ".join(f"{key} {x:.4g}" for key, x in times.items())
        if one["what"] != "profile" or one["problem"]:
            lines.append(f"{one['row']}, {one['implementation']}: {one['problem'] or text}")
    for one in report["targets"]:
        found = "not measured" if one["value"] is None else f"{one['value']:.4g}"
        verdict = {None: "unknown", True: "met", False: "missed"}[one["met"]]
        lines.append(f"{one['name']}: {found}, wanted {one['target']:g}: {verdict}")
    return "\n".join(lines)
