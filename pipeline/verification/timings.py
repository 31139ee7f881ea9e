"""The measurements: the kernels beside their peers, and a step of training."""

from collections.abc import Mapping
from typing import Any

import torch

from longhaul.kernels.delta.verify import tasks as delta_tasks
from longhaul.kernels.delta.verify.tasks import DeltaTask
from longhaul.kernels.power.verify import tasks
from longhaul.kernels.power.verify.benchmark import Task, compile_part
from longhaul.kernels.power.verify.targets import targets_of
from longhaul.pipeline.verification.check import Check, Needs, Place
from longhaul.pipeline.verification.models import STEPS, Step

_SECONDS = 150


def headline_timings() -> list[Check]:
    return [_timing(task) for task in tasks.headline_tasks()]


def op_timings() -> list[Check]:
    return [*map(_timing, tasks.op_tasks()), *map(_timing, delta_tasks.op_tasks())]


def peer_timings() -> list[Check]:
    """What the peers' autotuners try is compiled by several processes, before their times."""
    peers = tasks.peer_tasks()
    compiled = [
        Check(
            part="timings",
            name=f"{task.name}, part {part} of what it compiles",
            function=compile_peer,
            argument=(task, part),
            seconds=_SECONDS,
            is_alone=False,
            gigabytes=3,
            needs=_needs(task),
            is_ours=False,
        )
        for task in peers
        for part in range(tasks.COMPILED_BEFORE.get(task.implementation, 0))
    ]
    return [*compiled, *map(_timing, peers), *map(_timing, delta_tasks.peer_tasks())]


def step_timings() -> list[Check]:
    """One update of a model of 124M parameters, the usual kind first."""
    return [
        Check(
            part="timings",
            name=f"training step: {step.name}",
            function=time_task,
            argument=step,
            seconds=180,
            needs=Needs(gpu=True),
        )
        for step in STEPS
    ]


def targets(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each target of speed beside what the results of these checks say."""
    every = [*tasks.headline_tasks(), *tasks.op_tasks(), *tasks.peer_tasks()]
    return targets_of(
        {task: results.get(f"timings: {task.name}", {}).get("result") or {} for task in every}
    )


def _timing(task: Task | DeltaTask) -> Check:
    return Check(
        part="timings",
        name=task.name,
        function=time_task,
        argument=task,
        seconds=_SECONDS,
        needs=_needs(task),
        is_ours=task.is_ours,
    )


def _needs(task: Task | DeltaTask) -> Needs:
    return Needs(gpu=True, packages=() if task.package is None else (task.package,))


def time_task(task: Task | DeltaTask | Step, place: Place) -> dict[str, Any]:
    """A measurement, and no memory kept for the next one."""
    found = task.measure(torch.device(place.device))
    if place.device == "cuda":
        torch.cuda.empty_cache()
    return found


def compile_peer(argument: tuple[Task, int], place: Place) -> dict[str, Any]:
    task, part = argument
    compile_part(task, part, tasks.COMPILED_BEFORE[task.implementation], torch.device(place.device))
    return {}
