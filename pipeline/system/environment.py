"""Describes what a run ran on: commit, packages, machine."""

import inspect
import os
import platform
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import psutil
import torch

from longhaul.datamodules.files.untrusted import Sha256, sha256_of
from longhaul.kernels.backend import why_unavailable
from longhaul.modules.attention import attention_config
from longhaul.pipeline.system.programs import driver_version, output_of
from longhaul.pipeline.system.waiting import GIT_S

_NAME_AND_VERSION = re.compile(r"^(Name|Version): *(.+)$", re.MULTILINE)
_PACKAGES = ("configs", "datamodules", "kernels", "modules", "pipeline", "slurm")


def describe_environment(kinds: Iterable[str]) -> dict[str, Any]:
    """Everything needed to reproduce a run's numbers elsewhere, as JSON values.

    Args:
        kinds: the attention variants whose sources are identified.
    """
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "commit": source_commit(),
        "attention_sha256": source_hashes(kinds),
        "python": platform.python_version(),
        "packages": installed_packages(),
        "machine": platform.machine(),
        "system": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "accelerators": devices,
        "triton": _triton_configurations() if devices else None,
        "cuda": torch.version.cuda or torch.version.hip,
        "driver": driver_version() if devices else None,
        "nccl": _nccl_version() if devices else None,
    }


def installed_packages() -> dict[str, str]:
    """Versions of the installed packages, by their names."""
    found = {}
    for one in distributions():
        # Its `metadata` would parse all it says of itself, which takes six times as long.
        # The last is a package that is one file.
        text = next(filter(None, map(one.read_text, ("METADATA", "PKG-INFO", ""))), "")
        said = dict(_NAME_AND_VERSION.findall(text.partition("\n\n")[0]))
        if len(said) == 2:  # what is half removed says nothing
            found[said["Name"]] = said["Version"]
    return dict(sorted(found.items()))


def _triton_configurations() -> dict[str, Any] | None:
    """The chip of the first GPU, and the configuration of every kernel that follows from it."""
    device = torch.device("cuda", 0)
    if why_unavailable("triton", device) is not None:
        return None
    # Triton takes long to import, and may not be installed.
    from longhaul.kernels.common.triton.launch import chip_of
    from longhaul.kernels.power.triton.tile_sizes import choices

    chip = chip_of(device)
    return {"chip": chip, "configurations": choices(chip)}


def _nccl_version() -> str | None:
    try:
        from torch.cuda import nccl  # Not there in builds without CUDA.

        return ".".join(map(str, nccl.version()))
    except (ImportError, AttributeError, RuntimeError):
        return None


def main_device() -> str:
    """The name of what a run computes on: its first GPU, or the processor."""
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else _processor()


@dataclass(frozen=True)
class Environment:
    """The part of `describe_environment` that is read again."""

    commit: str | None = None
    accelerators: list[str] = field(default_factory=list)
    processor: str | None = None
    attention_sha256: dict[str, Sha256] = field(default_factory=dict)


def source_checkout() -> Path | None:
    """The git checkout that the code runs from, None if it is an installed package."""
    checkout = Path(__file__).resolve().parents[2]
    return checkout if (checkout / ".git").exists() else None


def source_commit() -> str | None:
    """Commit of the checkout, with "-dirty" if its code differs from it; None if git fails.

    Code differs where a file was changed, and where a package holds a file that git does not track,
    such as an attention variant of one's own.
    """
    checkout = source_checkout()
    if checkout is None:
        return None
    git = ("git", "-C", str(checkout))
    commit = output_of(*git, "describe", "--always", "--dirty", "--abbrev=40", seconds=GIT_S)
    if not commit or commit.endswith("-dirty"):
        return commit or None
    listing = ("ls-files", "--others", "--exclude-standard", "--", *_PACKAGES)
    untracked = output_of(*git, *listing, seconds=GIT_S)
    return commit if untracked == "" else f"{commit}-dirty"


def source_hashes(kinds: Iterable[str]) -> dict[str, str]:
    """SHA-256 of the file in which each kind of attention is written, in hexadecimal."""
    files = {kind: inspect.getsourcefile(attention_config(kind)) for kind in kinds}
    return {kind: sha256_of(Path(file)) for kind, file in files.items() if file is not None}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
