"""Describes what a run ran on: commit, packages, machine."""

import importlib.metadata
import os
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from longhaul.pipeline.system.programs import output_of


def describe_environment() -> dict[str, Any]:
    """Everything needed to reproduce a run's numbers elsewhere, as JSON values."""
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "commit": source_commit(),
        "python": platform.python_version(),
        "packages": {
            package.name: package.version
            for package in sorted(importlib.metadata.distributions(), key=lambda one: one.name)
        },
        "machine": platform.machine(),
        "system": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "accelerators": devices,
    }


@dataclass(frozen=True)
class Environment:
    """The part of `describe_environment` that is read again."""

    commit: str | None = None
    accelerators: list[str] = field(default_factory=list)
    processor: str | None = None


def main_device() -> str:
    """The name of what a run computes on: its first GPU, or the processor."""
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else _processor()


def source_checkout() -> Path | None:
    """The git checkout that the code runs from, None if it is an installed package."""
    checkout = Path(__file__).resolve().parents[2]
    return checkout if (checkout / ".git").exists() else None


def source_commit() -> str | None:
    """Commit of the checkout, with "-dirty" if files were changed since; None if git fails."""
    checkout = source_checkout()
    if checkout is None:
        return None
    describe = ("git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=40")
    return output_of(*describe, seconds=10) or None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
