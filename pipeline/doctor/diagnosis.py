"""Checks what this machine or allocation can run, and prints why it cannot.

Under `srun` with one task per node, each node first checks itself, and then the nodes are checked
together. With srun's --kill-on-bad-exit every finding is still printed, but the job's exit status
may be that of a task that srun ended.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

import torch

from longhaul.configs import RunConfig
from longhaul.pipeline.doctor.bandwidth import check_gloo, check_local_nccl
from longhaul.pipeline.doctor.finding import (
    Check,
    Finding,
    is_a_check_running,
    run_check,
)
from longhaul.pipeline.doctor.gpu_checks import (
    check_cache,
    check_compile,
    check_cpus,
    check_memlock,
    check_shared_memory,
    check_tools,
    check_triton,
)
from longhaul.pipeline.doctor.machine_checks import (
    check_commit,
    check_disk,
    check_gpus,
    check_idle,
    check_slurm,
    check_time,
    check_torch,
)
from longhaul.pipeline.doctor.nodes import JobTask, find_job_task, meet_other_nodes
from longhaul.pipeline.doctor.run_checks import (
    check_shape,
    check_shards,
    check_tracking,
    checkpoint_bytes,
    seconds_to_stop,
)
from longhaul.pipeline.runs.folder import RunFolder
from longhaul.pipeline.system.compile_caches import use_private_caches
from longhaul.pipeline.system.waiting import (
    CHECK_S,
    COMPILING_S,
    GIT_CHECK_S,
    GLOO_CHECK_S,
    GPU_CHECK_S,
)

EXIT_BAD_MACHINE = 69
"""EX_UNAVAILABLE: the run may work on another node."""

_ORDER = ("FAILURE", "warning", "ok")


def diagnose(config: RunConfig | None) -> int:
    """Print the findings; return 0, EXIT_BAD_MACHINE, or 2 for a run that fails on any machine."""
    here = find_job_task()
    if here is None:
        status = _diagnose_machine(config)
    else:
        # With several tasks per node, as in training, one task checks the node for all of them.
        status = _diagnose_node(config, here) if here.is_first_task else 0
    if is_a_check_running():
        # A check that hangs in a driver would also keep the interpreter from exiting.
        sys.stdout.flush()
        os._exit(status)
    return status


def _diagnose_machine(config: RunConfig | None) -> int:
    findings = []
    for finding in chain(_machine_findings(config, None), _run_findings(config, None)):
        print(finding, flush=True)
        findings.append(finding)
    return _status(findings)


def _diagnose_node(config: RunConfig | None, here: JobTask) -> int:
    findings = [*_machine_findings(config, here), *_run_findings(config, here)]
    # Printed before the nodes wait for each other, so that the log has it even if they hang.
    _print(here, findings)
    failures = {finding.subject: finding for finding in findings if finding.status == "FAILURE"}
    (commit,) = (finding for finding in findings if finding.subject == "commit")
    # A check that failed may hang, and is not repeated.
    mine = {
        "commit": None if commit.has_timed_out or "commit" in failures else commit.text,
        "gpus": 0 if "gpu" in failures or _is_on_cpus(config) else torch.cuda.device_count(),
        "failures": [subject for subject, one in failures.items() if one.fault == "machine"],
        "unless_shared": [subject for subject, one in failures.items() if one.fault == "either"],
    }
    shared = meet_other_nodes(here, mine, partial(_print, here)) if len(here.names) > 1 else []
    return _status([*findings, *shared])


def _machine_findings(config: RunConfig | None, here: JobTask | None) -> Iterator[Finding]:
    yield run_check("torch", check_torch, CHECK_S)
    yield run_check("commit", check_commit, GIT_CHECK_S)
    trainer = None if config is None else config.trainer
    wanted = (None,) if trainer is None else (trainer.devices, trainer.accelerator)
    run_gpu_check = partial(run_check, seconds=GPU_CHECK_S, if_timed_out="FAILURE")
    gpu = run_gpu_check("gpu", partial(check_gpus, *wanted))
    yield gpu
    # If the driver hangs, another question to it would hang here.
    if gpu.status == "ok" and not _is_on_cpus(config) and torch.cuda.is_available():
        yield run_gpu_check("idle", check_idle)
        yield run_gpu_check("nccl", check_local_nccl)
        yield from _findings_beside_gpus(config)
    yield run_check("gloo", check_gloo, GLOO_CHECK_S)
    folder = Path() if config is None else RunFolder.of(config).path
    # An old checkpoint is deleted only after the new one is complete.
    needed = 0 if config is None else 2 * checkpoint_bytes(config)
    yield run_check("disk", partial(check_disk, folder, needed), CHECK_S)
    yield run_check("slurm", check_slurm, CHECK_S)
    if "SLURM_JOB_ID" in os.environ:
        to_stop = None if config is None else seconds_to_stop(config)
        yield run_check("time", partial(check_time, to_stop), CHECK_S)
        allocated, in_step = _num_nodes(here)
        if in_step < allocated:
            text = f"only {in_step} of the allocation's {allocated} nodes were checked"
            remedy = f"srun --overlap --nodes={allocated} --ntasks-per-node=1 longhaul doctor"
            yield Finding("warning", "nodes", text, remedy)


def _is_on_cpus(config: RunConfig | None) -> bool:
    return config is not None and config.trainer.accelerator == "cpu"


def _findings_beside_gpus(config: RunConfig | None) -> Iterator[Finding]:
    """What a node needs for its GPUs, each checked on the first of them."""
    trainer = None if config is None else config.trainer
    on_node = torch.cuda.device_count() if trainer is None else trainer.devices
    ranks = on_node if trainer is None else trainer.world_size
    tools = run_check("tools", check_tools, CHECK_S)
    yield tools
    yield run_check("cache", partial(check_cache, ranks), CHECK_S)
    use_private_caches()  # as runs do
    if tools.status == "ok":  # otherwise both fail for the same reason
        yield run_check("triton", check_triton, COMPILING_S)
        is_needed = trainer is None or trainer.is_compiled(on_gpu=True)
        check = partial(check_compile, is_needed=is_needed)
        yield run_check("compile", check, COMPILING_S)
    for subject, one in (
        ("memlock", check_memlock),
        ("shm", check_shared_memory),
        ("cpus", partial(check_cpus, on_node)),
    ):
        yield run_check(subject, one, CHECK_S)


def _run_findings(config: RunConfig | None, here: JobTask | None) -> Iterator[Finding]:
    if config is None:
        return
    checks: dict[str, Check] = {
        "tracking": partial(check_tracking, config),
        "shards": partial(check_shards, config, here.node if here else 0),
    }
    if "SLURM_JOB_ID" in os.environ:
        checks["shape"] = partial(check_shape, config, *_num_nodes(here))
    for subject, check in checks.items():
        finding = run_check(subject, check, CHECK_S)
        # A run continues without MLflow.
        if finding[:2] == ("FAILURE", "tracking"):
            finding = finding._replace(status="warning")
        yield finding


def _num_nodes(here: JobTask | None) -> tuple[int, int]:
    """How many nodes the allocation has, and how many of them run this job step."""
    in_step = 1 if here is None else len(here.names)
    return int(os.environ.get("SLURM_JOB_NUM_NODES", in_step)), in_step


def _print(here: JobTask, findings: Sequence[Finding]) -> None:
    ordered = sorted(findings, key=lambda finding: _ORDER.index(finding.status))
    # In one write, so that lines of other nodes do not come in between.
    print("".join(f"{here.name}: {finding}\n" for finding in ordered), end="", flush=True)


def _status(findings: Sequence[Finding]) -> int:
    faults = {finding.fault for finding in findings if finding.status == "FAILURE"}
    if "machine" in faults:
        return EXIT_BAD_MACHINE
    return 2 if faults else 0
