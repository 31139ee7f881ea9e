"""Runs the checks that a file of results lacks, until all are done or the time is over."""

import math
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from longhaul.pipeline.verification.check import Check, Place
from longhaul.pipeline.verification.machine import Machine, find_machine
from longhaul.pipeline.verification.record import Record
from longhaul.pipeline.verification.summary import print_line, print_summary
from longhaul.pipeline.verification.workers import Job, Outcome, run_jobs

EXIT_UNFINISHED = 75
"""Exit status if checks are left: the same command goes on with them."""

_MOST_PROCESSES = 12
_SECONDS_TO_FIND = 180.0
# For ending processes and for the summary.
_SECONDS_TO_END = 5.0
# Of a GPU's memory; the rest is for what the estimates leave out.
_SHARE_OF_MEMORY = 0.85

Targets = Callable[[Mapping[str, Any]], list[dict[str, Any]]]


def verify(path: Path, minutes: float | None) -> int:
    """Run what is left; print a line for each check, and a summary.

    Args:
        path: the results so far and to come.
        minutes: how long this command may take; None for as long as it takes.

    Returns:
        0 if everything of this project has passed or was skipped, 1 if anything failed,
        EXIT_UNFINISHED if checks are left.
    """
    deadline = float("inf") if minutes is None else time.monotonic() + 60 * minutes
    machine = _machine()
    # Here, because they import torch, which takes seconds.
    from longhaul.pipeline.system.compile_caches import use_private_caches
    from longhaul.pipeline.verification.plan import all_checks
    from longhaul.pipeline.verification.timings import targets

    use_private_caches()
    checks = all_checks(machine)
    # Each piece must end its first check, or all pieces would be in vain.
    least = 1 + math.ceil(max(check.seconds for check in checks) / 60)
    if minutes is not None and not minutes >= least:
        raise ValueError(
            f"--minutes: found {minutes:g}, wanted {least} or more, for the longest check"
        )
    # Ends like an interrupt, which leaves no processes and no files behind.
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        return run_checks(path, machine, checks, targets, deadline - _SECONDS_TO_END)
    finally:
        signal.signal(signal.SIGTERM, before)


def _machine() -> Machine:
    """This machine, as a process of its own finds it: a broken GPU may end or hang that one."""
    found: list[Outcome] = []
    run_jobs(
        [Job(find_machine, (), _SECONDS_TO_FIND)],
        num_processes=1,
        deadline=float("inf"),
        ended=lambda _, outcome: found.append(outcome),
    )
    if found[0].status != "returned":
        raise RuntimeError(
            f"verify: found no answer from torch about the devices, {found[0].result}"
        )
    machine: Machine = found[0].result
    return machine


def run_checks(
    path: Path, machine: Machine, checks: Sequence[Check], targets: Targets, deadline: float
) -> int:
    """As `verify`, with the given checks of the given machine.

    Args:
        targets: the targets that results of checks, by their keys, meet or miss.
        deadline: on the clock of time.monotonic.
    """
    record = Record(path, machine)
    for check in checks:
        if not record.has(check.key) and (reason := check.needs.unmet(machine)):
            record.skip(check.key, reason)
    left = [check for check in checks if not record.has(check.key)]
    skipped = sum(one["status"] == "skipped" for one in record.results.values())
    print(
        f"{machine.name}: {len(checks)} checks, of which {len(left)} are to run; {skipped} cannot "
        "run here",
        flush=True,
    )
    try:
        with tempfile.TemporaryDirectory(
            prefix="longhaul-verify-", ignore_cleanup_errors=True
        ) as name:
            place = Place(machine.device, Path(name))
            # In the given order; those in a row that may run at the same time do.
            for _, group in groupby(left, key=lambda check: check.is_alone):
                _run(list(group), record, machine, place, len(checks) - skipped, deadline)
    finally:
        record.forget_attempts()
    record.finish(targets(record.results))
    print_summary(record, [check.key for check in checks])
    if not all(record.has(check.key) for check in checks):
        return EXIT_UNFINISHED
    return 0 if record.has_passed else 1


def _run(
    checks: Sequence[Check],
    record: Record,
    machine: Machine,
    place: Place,
    total: int,
    deadline: float,
) -> None:
    def begin(numbers: Sequence[int]) -> None:
        record.begin(checks[number].key for number in numbers)

    def end(number: int, outcome: Outcome) -> None:
        _keep(record, checks[number], outcome)
        print_line(record, checks[number].key, total)

    run_jobs(
        [
            Job(check.function, (check.argument, place), check.seconds, check.gigabytes)
            for check in checks
        ],
        num_processes=1 if checks[0].is_alone else min(_MOST_PROCESSES, machine.cores),
        gigabytes=machine.memory_gigabytes * _SHARE_OF_MEMORY or float("inf"),
        deadline=deadline,
        began=begin,
        ended=end,
    )


def _keep(record: Record, check: Check, outcome: Outcome) -> None:
    if outcome.status == "returned":
        result: dict[str, Any] = outcome.result
        faults = result.pop("faults", [])
        status = "failed" if faults else "passed"
    else:
        result, faults = {}, [outcome.result]
        status = "failed" if outcome.status == "raised" else outcome.status
        if not check.is_ours:
            status = "unavailable"
    seconds = round(outcome.seconds, 1)
    record.end(check.key, status, seconds=seconds, faults=faults, result=result)
