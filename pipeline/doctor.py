"""`longhaul doctor`: what this machine or allocation can run, and why not.

Started by `srun`, one task a node, each node checks itself, and then they meet. With srun's
--kill-on-bad-exit all is said, too, but the job's status may be that of a task that srun ended.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from longhaul.configs import RunConfig, load_run_config
from longhaul.pipeline.bandwidth import check_gloo, check_local_nccl
from longhaul.pipeline.doctor_machine import (
    check_commit,
    check_disk,
    check_gpus,
    check_idle,
    check_slurm,
    check_time,
    check_torch,
)
from longhaul.pipeline.doctor_nodes import Place, meet, place
from longhaul.pipeline.doctor_run import (
    check_shape,
    check_shards,
    check_space,
    check_tracking,
    seconds_to_stop,
)
from longhaul.pipeline.environment import source_commit
from longhaul.pipeline.finding import SECONDS_OF_GPUS, Check, Finding, find, is_one_left
from longhaul.pipeline.run_folder import RunFolder, anchored

EXIT_BAD_MACHINE = 69
"""EX_UNAVAILABLE: another node may do better."""

_SECONDS = 8.0
_ORDER = ("FAILURE", "warning", "ok")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", nargs="?", help="also check what this run needs")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="wins over the file")


def main(args: argparse.Namespace) -> int:
    config = None
    if args.config is not None:
        config = anchored(load_run_config(args.config, args.overrides))
    here = place()
    if here is None:
        status = _alone(config)
    else:
        # With several tasks a node, as training has, the others have nothing to add.
        status = _among_nodes(config, here) if here.is_first_task else 0
    if is_one_left():
        # What hangs in a driver would also hold the interpreter at its end.
        sys.stdout.flush()
        os._exit(status)
    return status


def _alone(config: RunConfig | None) -> int:
    machine, run = [], []
    for finding in _machine(config):
        print(finding, flush=True)
        machine.append(finding)
    for finding in _run(config, None):
        print(finding, flush=True)
        run.append(finding)
    return _status(machine, run)


def _among_nodes(config: RunConfig | None, here: Place) -> int:
    machine, run = list(_machine(config)), list(_run(config, here))
    # Before the nodes meet, where they may have to wait: this is in the log then.
    _print(here, [*machine, *run])
    failures = [finding.what for finding in _of_machine(machine, run)]
    # What failed may hang, and is not asked again.
    mine = {
        "commit": None if "commit" in failures else source_commit(),
        "gpus": 0 if "gpu" in failures else torch.cuda.device_count(),
        "failures": failures,
    }
    together = meet(here, mine, partial(_print, here)) if len(here.names) > 1 else []
    return _status([*machine, *together], run)


def _machine(config: RunConfig | None) -> Iterator[Finding]:
    yield find("torch", check_torch, _SECONDS)
    yield find("commit", check_commit, _SECONDS)
    devices = None if config is None else config.trainer.devices
    gpu = find("gpu", partial(check_gpus, devices), SECONDS_OF_GPUS)
    yield gpu
    # Where the driver hangs, asking it once more would hang here.
    if gpu.status == "ok" and torch.cuda.is_available():
        yield find("idle", check_idle, _SECONDS)
        yield find("nccl", check_local_nccl, SECONDS_OF_GPUS)
    yield find("gloo", check_gloo, _SECONDS)
    folder = Path() if config is None else RunFolder.of(config).path
    yield find("disk", partial(check_disk, folder), _SECONDS)
    yield find("slurm", check_slurm, _SECONDS)
    if "SLURM_JOB_ID" in os.environ:
        needed = None if config is None else seconds_to_stop(config)
        yield find("time", partial(check_time, needed), _SECONDS)
        if place() is None and os.environ.get("SLURM_NNODES", "1") != "1":
            text = f"only this one of {os.environ['SLURM_NNODES']} is checked"
            remedy = "srun --ntasks-per-node=1 longhaul doctor"
            yield Finding("warning", "nodes", text, remedy)


def _run(config: RunConfig | None, here: Place | None) -> Iterator[Finding]:
    if config is None:
        return
    checks: dict[str, Check] = {
        "space": partial(check_space, config),
        "tracking": partial(check_tracking, config),
        "shards": partial(check_shards, config, here.node if here else 0),
    }
    if here is not None:
        checks["shape"] = partial(check_shape, config, len(here.names))
    for what, check in checks.items():
        finding = find(what, check, _SECONDS)
        # A run goes on without MLflow, also where its name cannot be looked up in time.
        yield (
            finding._replace(status="warning")
            if finding[:2] == ("FAILURE", "tracking")
            else finding
        )


def _print(here: Place, findings: Sequence[Finding]) -> None:
    ordered = sorted(findings, key=lambda finding: _ORDER.index(finding.status))
    # In one write, which those of other nodes do not come between.
    print("".join(f"{here.name}: {finding}\n" for finding in ordered), end="", flush=True)


def _status(machine: Sequence[Finding], run: Sequence[Finding]) -> int:
    if _of_machine(machine, run):
        return EXIT_BAD_MACHINE
    return 2 if any(finding.status == "FAILURE" for finding in run) else 0


def _of_machine(machine: Sequence[Finding], run: Sequence[Finding]) -> Sequence[Finding]:
    """The failures that another machine might not have: its own, and data that hang."""
    found = [*machine, *(finding for finding in run if finding.is_late)]
    return [finding for finding in found if finding.status == "FAILURE"]
