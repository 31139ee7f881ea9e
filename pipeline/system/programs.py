"""Other programs, asked with a time limit."""

import subprocess


def output_of(*command: str, seconds: float = 5) -> str | None:
    """What a program prints, None when it is absent, fails, or is not done in so many seconds."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
