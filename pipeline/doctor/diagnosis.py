"""Checks what this machine or allocation can run, and says why not.

Started by `srun`, one task a node, each node checks itself, and then they meet. With srun's
--kill-on-bad-exit all is said, too, but the job's status may be that of a task that srun ended.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

import torch

from longhaul.configs import RunConfig
from longhaul.pipeline.doctor.bandwidth import SECONDS_OF_GLOO, check_gloo, check_local_nccl
from longhaul.pipeline.doctor.finding import SECONDS_OF_GPUS, Check, Finding, find, is_one_left
from longhaul.pipeline.doctor.machine import (
    check_commit,
    check_disk,
    check_gpus,
    check_idle,
    check_slurm,
    check_time,
    check_torch,
)
from longhaul.pipeline.doctor.nodes import Place, meet, place
from longhaul.pipeline.doctor.run import (
    check_shape,
    check_shards,
    check_tracking,
    checkpoint_bytes,
    seconds_to_stop,
)
from longhaul.pipeline.runs.folder import RunFolder

EXIT_BAD_MACHINE = 69
"""EX_UNAVAILABLE: another node may do better."""

_SECONDS = 8.0
_SECONDS_OF_GIT = 12.0  # it gives up by itself after 10
_ORDER = ("FAILURE", "warning", "ok")


def diagnose(config: RunConfig | None) -> int:
    """Print what is found; return 0, EXIT_BAD_MACHINE, or 2 for a run that cannot go anywhere."""
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
    findings = []
    for finding in chain(_machine(config, None), _run(config, None)):
        print(finding, flush=True)
        findings.append(finding)
    return _status(findings)


def _among_nodes(config: RunConfig | None, here: Place) -> int:
    findings = [*_machine(config, here), *_run(config, here)]
    # Before the nodes meet, where they may have to wait: this is in the log then.
    _print(here, findings)
    failures = {finding.what: finding for finding in findings if finding.status == "FAILURE"}
    (commit,) = (finding for finding in findings if finding.what == "commit")
    # What failed may hang, and is not asked again.
    mine = {
        "commit": None if commit.is_late or "commit" in failures else commit.text,
        "gpus": 0 if "gpu" in failures else torch.cuda.device_count(),
        "failures": [what for what, one in failures.items() if one.fault == "machine"],
        "unless_shared": [what for what, one in failures.items() if one.fault == "either"],
    }
    together = meet(here, mine, partial(_print, here)) if len(here.names) > 1 else []
    return _status([*findings, *together])


def _machine(config: RunConfig | None, here: Place | None) -> Iterator[Finding]:
    yield find("torch", check_torch, _SECONDS)
    yield find("commit", check_commit, _SECONDS_OF_GIT)
    devices = None if config is None else config.trainer.devices
    find_gpus = partial(find, seconds=SECONDS_OF_GPUS, if_late="FAILURE")
    gpu = find_gpus("gpu", partial(check_gpus, devices))
    yield gpu
    # Where the driver hangs, asking it once more would hang here.
    if gpu.status == "ok" and torch.cuda.is_available():
        yield find_gpus("idle", check_idle)
        yield find_gpus("nccl", check_local_nccl)
    yield find("gloo", check_gloo, SECONDS_OF_GLOO)
    folder = Path() if config is None else RunFolder.of(config).path
    # A new checkpoint is whole before an old one goes.
    needed = 0 if config is None else 2 * checkpoint_bytes(config)
    yield find("disk", partial(check_disk, folder, needed), _SECONDS)
    yield find("slurm", check_slurm, _SECONDS)
    if "SLURM_JOB_ID" in os.environ:
        to_stop = None if config is None else seconds_to_stop(config)
        yield find("time", partial(check_time, to_stop), _SECONDS)
        allocated, in_step = _num_nodes(here)
        if in_step < allocated:
            text = f"checked are only {in_step} of the allocation's {allocated}"
            remedy = f"srun --overlap --nodes={allocated} --ntasks-per-node=1 longhaul doctor"
            yield Finding("warning", "nodes", text, remedy)


def _run(config: RunConfig | None, here: Place | None) -> Iterator[Finding]:
    if config is None:
        return
    checks: dict[str, Check] = {
        "tracking": partial(check_tracking, config),
        "shards": partial(check_shards, config, here.node if here else 0),
    }
    if "SLURM_JOB_ID" in os.environ:
        checks["shape"] = partial(check_shape, config, *_num_nodes(here))
    for what, check in checks.items():
        finding = find(what, check, _SECONDS)
        # A run goes on without MLflow.
        if finding[:2] == ("FAILURE", "tracking"):
            finding = finding._replace(status="warning")
        yield finding


def _num_nodes(here: Place | None) -> tuple[int, int]:
    """Nodes of the allocation, and those of them that this step is on."""
    in_step = 1 if here is None else len(here.names)
    return int(os.environ.get("SLURM_JOB_NUM_NODES", in_step)), in_step


def _print(here: Place, findings: Sequence[Finding]) -> None:
    ordered = sorted(findings, key=lambda finding: _ORDER.index(finding.status))
    # In one write, which those of other nodes do not come between.
    print("".join(f"{here.name}: {finding}\n" for finding in ordered), end="", flush=True)


def _status(findings: Sequence[Finding]) -> int:
    faults = {finding.fault for finding in findings if finding.status == "FAILURE"}
    if "machine" in faults:
        return EXIT_BAD_MACHINE
    return 2 if faults else 0
