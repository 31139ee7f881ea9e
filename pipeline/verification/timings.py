"""The measurements: the kernels beside their peers, and a step of training."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from longhaul.kernels.verify.benchmark import Compilation, Task, measure
from longhaul.kernels.verify.targets import Measured, targets_of
from longhaul.kernels.verify.tasks import (
    Sizes,
    compilations_of,
    headline_tasks,
    op_tasks,
    package_of,
    peer_tasks,
)
from longhaul.pipeline.verification.check import Check, Needs, Place
from longhaul.pipeline.verification.training_step import STEPS, Step, measure_step

_SIZES = Sizes()


def headline_timings() -> list[Check]:
    return _timings(headline_tasks(_SIZES))


def op_timings() -> list[Check]:
    return _timings(op_tasks(_SIZES))


def peer_timings() -> list[Check]:
    return _timings(peer_tasks(_SIZES))


def step_timings() -> list[Check]:
    """One update of a model of 124M parameters, the usual kind first."""
    return [
        Check(
            part="timings",
            name=f"training step: {step.name}",
            function=time_step,
            argument=step,
            seconds=180,
            needs=Needs(gpu=True),
        )
        for step in STEPS
    ]


def targets(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each target of speed beside what the results of these checks say."""
    checks = [*headline_timings(), *op_timings(), *peer_timings()]
    return targets_of(
        [Measured(check.argument, results.get(check.key, {}).get("result")) for check in checks]
    )


def _timings(tasks: Sequence[Task]) -> list[Check]:
    return [_timing(task) for task in tasks]


def _timing(task: Task) -> Check:
    package = package_of(task)
    needs = Needs(gpu=True, packages=() if package is None else (package,))
    before = tuple(
        Check(
            part="timings",
            name=f"{task.name}, part {job.part} of what it compiles",
            function=compile_part,
            argument=job,
            seconds=150,
            is_alone=False,
            gigabytes=3,
        )
        for job in compilations_of(task)
    )
    return Check(
        part="timings",
        name=task.name,
        function=time_task,
        argument=task,
        seconds=150,
        needs=needs,
        is_ours=task.implementation.partition(",")[0] in ("longhaul", "torch"),
        before=before,
    )


def time_task(task: Task, place: Place) -> dict[str, Any]:
    """A measurement, and no memory kept for the next one."""
    found = measure(task, torch.device(place.device))
    _free(place)
    return found


def time_step(step: Step, place: Place) -> dict[str, Any]:
    found = measure_step(step, torch.device(place.device))
    _free(place)
    return found


def compile_part(job: Compilation, place: Place) -> dict[str, Any]:
    job.run(torch.device(place.device))
    return {}


def _free(place: Place) -> None:
    if place.device == "cuda":
        torch.cuda.empty_cache()
