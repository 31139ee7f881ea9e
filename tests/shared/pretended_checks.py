"""What a pretended check does in its process. Not a test."""

import os
import signal
import subprocess
import time
from typing import Any


def passes(argument: Any, place: Any) -> dict[str, Any]:
    return {"argument": argument, "ms": 1.5, "rate": float("nan")}


def fails(argument: Any, place: Any) -> dict[str, Any]:
    return {"faults": ["out: off by 1"]}


def raises(argument: Any, place: Any) -> dict[str, Any]:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def crashes(argument: Any, place: Any) -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGSEGV)
    return {}


def hangs(argument: Any, place: Any) -> dict[str, Any]:
    """It also starts a process, whose id it writes into the file that the argument names."""
    process = subprocess.Popen(["sleep", "600"])
    if argument is not None:
        with open(argument, "w") as file:
            file.write(str(process.pid))
    time.sleep(600)
    return {}


def process_id(argument: Any, place: Any) -> int:
    return os.getpid()


def ends() -> None:
    os._exit(3)
