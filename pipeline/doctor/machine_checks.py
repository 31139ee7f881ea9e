"""Checks of one machine: packages, GPUs, disk, Slurm, and the time left to a job."""

import importlib.metadata
import os
import re
import shutil
import tempfile
import time
from datetime import datetime
from pathlib import Path

import torch

from longhaul.pipeline.cluster.jobs import slurm_job
from longhaul.pipeline.doctor.finding import Finding
from longhaul.pipeline.system.environment import source_checkout, source_commit
from longhaul.pipeline.system.programs import driver_version, output_of
from longhaul.pipeline.system.waiting import WRITING_S
from longhaul.pipeline.terminal.numbers import in_bytes

_WRITTEN_BYTES = 32 << 20
_SLOW_DISK = 30e6  # bytes per second
# By the major version of CUDA, from NVIDIA's table of minor version compatibility.
_OLDEST_DRIVERS = {"11": 450, "12": 525, "13": 580}
# A process that only holds a context takes about half a GB.
_IDLE_BYTES = 2 << 30


def check_torch() -> Finding:
    """Whether torch has the version of Triton that it was built with."""
    found = _version("triton")
    text = f"torch {torch.__version__}, Triton {found or 'absent'}"
    required = importlib.metadata.requires("torch") or []
    pins = (re.match(r"triton==([\d.]+)", requirement) for requirement in required)
    wanted = next((pin[1] for pin in pins if pin), None)
    if wanted is not None and found != wanted:
        text = f"{text}, wanted Triton {wanted}"
        return Finding("FAILURE", "torch", text, f"pip install triton=={wanted}")
    if found is None:
        return Finding("warning", "torch", text, "kernels will run in torch; pip install triton")
    return Finding("ok", "torch", text)


def check_gpus(wanted: int | None, accelerator: str = "auto") -> Finding:
    """Whether there are enough GPUs, with a driver, and each of them computes correctly.

    Args:
        wanted: how many (trainer.devices); None when no run is given.
        accelerator: trainer.accelerator.
    """
    if accelerator == "cpu":
        return Finding("ok", "gpu", "not looked for: trainer.accelerator is cpu")
    if not torch.cuda.is_available():
        return _without_gpus(is_needed=accelerator == "gpu")
    found = torch.cuda.device_count()
    for index in range(found):
        if (torch.arange(4, device=f"cuda:{index}").sum() != 6).item():
            return Finding(
                "FAILURE", "gpu", f"GPU {index} computes a wrong sum", "leave this node out"
            )
    names = " + ".join(sorted({torch.cuda.get_device_name(index) for index in range(found)}))
    text = f"{found} x {names}, driver {driver_version() or 'unknown'}"
    if wanted is not None and found < wanted:
        text = f"{text}, trainer.devices wants {wanted}"
        if found == 1 and "SLURM_STEP_ID" in os.environ:
            # With --gpus-per-task each task sees its own GPU, and this is one task of a node.
            return Finding("warning", "gpu", text, "right if each task has a GPU of its own")
        return Finding("FAILURE", "gpu", text, "ask for more, or set trainer.devices")
    return Finding("ok", "gpu", f"{text}, torch for CUDA {torch.version.cuda or torch.version.hip}")


def _without_gpus(*, is_needed: bool) -> Finding:
    allocated = os.environ.get("SLURM_GPUS_ON_NODE", "0")
    is_there = any(Path(device).exists() for device in ("/dev/nvidia0", "/dev/kfd"))
    if allocated == "0" and not is_there:
        if is_needed:
            text, remedy = "no GPU, trainer.accelerator wants one", "ask for GPUs, or set it to cpu"
            return Finding("FAILURE", "gpu", text, remedy)
        return Finding("ok", "gpu", "no GPU: kernels run in torch on the CPU")
    if torch.version.cuda is None and torch.version.hip is None:
        text = "the GPUs stay idle: this is torch's CPU build"
        return Finding("warning", "gpu", text, "install torch's build for these GPUs")
    build = torch.version.cuda or torch.version.hip
    text = f"torch for CUDA {build} finds none of this machine's GPUs"
    remedy = "nvidia-smi shows whether the driver works, or the job has no GPUs"
    driver, oldest = driver_version(), _OLDEST_DRIVERS.get((torch.version.cuda or "").split(".")[0])
    if driver is not None and oldest is not None and int(driver.split(".")[0]) < oldest:
        text = f"{text}: driver {driver} is too old, wanted {oldest} or newer"
        remedy = "a newer driver, or torch built for an older CUDA"
    is_failure = is_needed or allocated != "0"
    return Finding("FAILURE" if is_failure else "warning", "gpu", text, remedy)


def check_idle() -> Finding:
    """Whether other processes hold memory of the GPUs."""
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        used = total - free - torch.cuda.memory_reserved(index)
        if used > _IDLE_BYTES:
            text = f"GPU {index}: {in_bytes(used)} of {in_bytes(total)} are in use by others"
            remedy = "nvidia-smi names the processes; end them, or leave this node out"
            return Finding("FAILURE" if used > total / 10 else "warning", "idle", text, remedy)
    return Finding("ok", "idle", "no other process uses the GPUs")


def check_disk(folder: Path, needed: int) -> Finding:
    """Free space and speed of the disk that a folder is on, or will be on.

    Args:
        folder: need not exist yet.
        needed: bytes that must fit.
    """
    existing = nearest_existing(folder)
    try:
        rate = _write_rate(existing)
        free = shutil.disk_usage(existing).free
    except OSError as error:
        text = f"{existing} cannot be written: {error.strerror}"
        return Finding("FAILURE", "disk", text, "repair it, or set root to another folder")
    text = f"{in_bytes(free)} free in {folder}, {in_bytes(rate)}/s"
    if free < needed:
        text = f"{text}, wanted {in_bytes(needed)} for two checkpoints"
        return Finding("FAILURE", "disk", text, "make room, or set root to another folder")
    if rate < _SLOW_DISK:
        remedy = "checkpoints will take long: another file system for root?"
        return Finding("warning", "disk", f"{text}, wanted {in_bytes(_SLOW_DISK)}/s", remedy)
    return Finding("ok", "disk", text)


def nearest_existing(path: Path) -> Path:
    """The path, or the nearest of its parents that exists."""
    return next(one for one in (path, *path.absolute().parents) if one.exists())


def _write_rate(folder: Path) -> float:
    """Bytes per second that reach the disk."""
    block = os.urandom(8 << 20)  # random, since some file systems compress
    written, start = 0, time.perf_counter()
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        while written < _WRITTEN_BYTES and time.perf_counter() - start < WRITING_S:
            written += file.write(block)
            os.fsync(file.fileno())
    return written / (time.perf_counter() - start)


def check_commit() -> Finding:
    """The commit of the code that runs here."""
    commit = source_commit()
    if commit is None and source_checkout() is not None:
        text = "git gives no answer"
        return Finding("warning", "commit", text, "git status shows why", has_timed_out=True)
    if commit is None:
        return Finding("ok", "commit", f"no checkout: longhaul {_version('longhaul')} is installed")
    if commit.endswith("-dirty"):
        return Finding(
            "warning", "commit", f"{commit}: the checkout has uncommitted changes", "commit them"
        )
    return Finding("ok", "commit", commit)


def check_slurm() -> Finding:
    """Whether jobs can be submitted from here."""
    if shutil.which("sbatch") is None:
        return Finding("warning", "slurm", "no sbatch here", "jobs are submitted on a login node")
    if output_of("scontrol", "ping") is None:
        text = "sbatch is here, but no controller answers"
        return Finding("warning", "slurm", text, "scontrol ping shows why")
    return Finding("ok", "slurm", f"sbatch of {output_of('sbatch', '--version')}")


def check_time(needed: float | None) -> Finding:
    """The time that this job has left.

    Args:
        needed: seconds to stop with a last checkpoint; None when no run is given.
    """
    job = slurm_job(os.environ["SLURM_JOB_ID"])
    limit = job.get("TimeLimit", "unknown")
    try:
        left = (datetime.fromisoformat(job["EndTime"]) - datetime.now()).total_seconds()
    except (KeyError, ValueError):  # "Unknown"
        return Finding("ok", "time", f"limit {limit}")
    text = f"limit {limit}, {left / 60:.0f} minutes left"
    if needed is not None and left < needed:
        text = f"{text}, wanted {needed / 60:.1f} to stop with a checkpoint"
        return Finding("warning", "time", text, "set slurm.time, or lower trainer.stop_seconds")
    return Finding("ok", "time", text)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
