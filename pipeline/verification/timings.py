"""The measurements: the kernels beside their peers, and a step of training."""

from collections.abc import Mapping
from typing import Any

import torch

from longhaul.kernels.ops import OPS
from longhaul.kernels.verify.op import Measured, Measurement
from longhaul.pipeline.verification.check import Check, Needs, Place
from longhaul.pipeline.verification.training_step import STEPS, Step, measure_step

_TIMED = [op.timings for op in OPS if op.timings is not None]


def headline_timings() -> list[Check]:
    return [_timing(task) for timings in _TIMED for task in timings.headline]


def op_timings() -> list[Check]:
    return [_timing(task) for timings in _TIMED for task in timings.others]


def peer_timings() -> list[Check]:
    return [_timing(task) for timings in _TIMED for task in timings.peers]


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
    measured = [
        Measured(check.argument, results.get(check.key, {}).get("result")) for check in checks
    ]
    return [
        target
        for timings in _TIMED
        for target in timings.targets([one for one in measured if one.task in timings.tasks])
    ]


def _timing(task: Measurement) -> Check:
    package = task.package
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
        for job in task.compilations()
    )
    return Check(
        part="timings",
        name=task.name,
        function=time_task,
        argument=task,
        seconds=150,
        needs=needs,
        is_ours=task.is_ours,
        before=before,
    )


def time_task(task: Measurement, place: Place) -> dict[str, Any]:
    """A measurement, and no memory kept for the next one."""
    found = task.measure(torch.device(place.device))
    _free(place)
    return found


def time_step(step: Step, place: Place) -> dict[str, Any]:
    found = measure_step(step, torch.device(place.device))
    _free(place)
    return found


def compile_part(job: Any, place: Place) -> dict[str, Any]:
    job.run(torch.device(place.device))
    return {}


def _free(place: Place) -> None:
    if place.device == "cuda":
        torch.cuda.empty_cache()
