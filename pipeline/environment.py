"""What a run ran on: commit, packages, machine."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import psutil
import torch

_PACKAGES = (
    "longhaul",
    "torch",
    "triton",
    "lightning",
    "torchmetrics",
    "webdataset",
    "omegaconf",
    "mlflow",
    "safetensors",
    "numpy",
)


def describe_environment() -> dict[str, Any]:
    """Everything needed to say where numbers came from, as plain JSON."""
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "commit": source_commit(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "machine": platform.machine(),
        "system": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "accelerators": devices,
    }


def source_commit() -> str | None:
    """Commit of the checkout that the code runs from, "-dirty" when it was changed since."""
    checkout = Path(__file__).resolve().parent.parent
    if not (checkout / ".git").exists():
        return None
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
