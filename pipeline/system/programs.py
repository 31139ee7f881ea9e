"""Runs other programs with a time limit."""

import subprocess
from contextlib import suppress
from pathlib import Path

from longhaul.pipeline.system.waiting import MACHINE_S


def output_of(*command: str, seconds: float = 5) -> str | None:
    """A program's stdout; None if it is not installed, fails, or exceeds the time limit."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def driver_version() -> str | None:
    """The version of NVIDIA's or AMD's driver, None if neither tells."""
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")
    if found := output_of(*query, seconds=MACHINE_S):
        return found
    with suppress(OSError):
        return Path("/sys/module/amdgpu/version").read_text().strip()
    return None
