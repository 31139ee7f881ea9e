"""The machine that is verified: its device, and the versions of what runs on it."""

import hashlib
import os
import platform
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from longhaul.pipeline.system.programs import driver_version, output_of

_CHECKOUT = Path(__file__).resolve().parents[2]
_FOLDERS = ("configs", "datamodules", "kernels", "modules", "pipeline")

# Distributions whose versions stand beside the times.
_VERSIONS = ("torch", "triton", "lightning", "deepspeed", "mlflow", "fla-core", "retention")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What results depend on: they are continued on an equal machine only."""

    device: str = "cpu"  # "cuda" or "cpu"
    name: str = ""  # of the GPU or the processor
    capability: str = ""
    memory_gigabytes: float = 0.0  # of one GPU
    devices: int = 0  # number of GPUs
    driver: str = ""
    cores: int = 1
    versions: dict[str, str] = field(default_factory=dict)
    commit: str = ""  # empty without git
    code: str = ""  # a hash of all files of the packages


def find_machine() -> Machine:
    """Describe this machine. It begins to use the GPU, so a process of its own should call it."""
    import torch

    versions = {"python": platform.python_version()}
    for name in _VERSIONS:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    has_gpu = torch.cuda.is_available()
    found = torch.cuda.get_device_properties(0) if has_gpu else None
    return Machine(
        device="cuda" if has_gpu else "cpu",
        name=found.name if found else platform.processor() or platform.machine(),
        capability=f"{found.major}.{found.minor}" if found else "",
        memory_gigabytes=found.total_memory / 1e9 if found else 0.0,
        devices=torch.cuda.device_count() if has_gpu else 0,
        driver=(driver_version() or "") if has_gpu else "",
        cores=len(os.sched_getaffinity(0)),
        versions=versions,
        commit=_commit(),
        code=code_hash(),
    )


def _commit() -> str:
    if not (_CHECKOUT / ".git").exists():
        return ""
    return output_of("git", "-C", str(_CHECKOUT), "describe", "--always", "--dirty") or ""


def code_hash() -> str:
    """SHA-256 of all Python files and presets of the packages, which need not be under git."""
    total = hashlib.sha256()
    for file in [*source_files(".py"), *source_files(".yaml")]:
        total.update(f"{file.relative_to(_CHECKOUT)}\0".encode())
        total.update(file.read_bytes())
    return total.hexdigest()


def source_files(suffix: str) -> list[Path]:
    """The files of the packages that end so."""
    found = (sorted((_CHECKOUT / folder).rglob(f"*{suffix}")) for folder in _FOLDERS)
    return [file for files in found for file in files]
