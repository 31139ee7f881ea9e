"""Runs other programs with a time limit."""

import subprocess


def output_of(*command: str, seconds: float = 5) -> str | None:
    """A program's stdout; None if it is not installed, fails, or exceeds the time limit."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
