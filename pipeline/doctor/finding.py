"""What a check of `longhaul doctor` finds, and a bound on how long it may look."""

import threading
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

SECONDS_OF_GPUS = 90.0
"""For a check that makes contexts on all GPUs of a node, cold ones too, or connects them."""

Status: TypeAlias = Literal["ok", "warning", "FAILURE"]

Fault: TypeAlias = Literal["machine", "input", "either"]
"""Whose a failure is: this machine's, and another may do better; the input's, on every machine; or
the one if other nodes do not find it, and the other if they do."""


class Finding(NamedTuple):
    """One line of the doctor's."""

    status: Status
    what: str
    text: str
    remedy: str = ""
    fault: Fault = "machine"
    is_late: bool = False
    """There was no answer, or not in time."""

    def __str__(self) -> str:
        line = f"{self.status:<8} {self.what:<9} {self.text}"
        return f"{line}; {self.remedy}" if self.remedy else line


Check: TypeAlias = Callable[[], Finding]

_NAME = "longhaul check"


def find(what: str, check: Check, seconds: float, *, if_late: Status = "warning") -> Finding:
    """What a check finds; that it raised is a failure.

    Args:
        seconds: how long it may look.
        if_late: what it is to be longer. A shared file system that is slow for a moment should not
            end a run, and one that hangs is found by the training's watchdog.
    """
    found: list[Finding] = []

    def look() -> None:
        try:
            found.append(check())
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            found.append(Finding("FAILURE", what, f"{type(error).__name__}: {reason}"))

    # A thread, since a file system or driver that hangs cannot be interrupted, only left behind.
    thread = threading.Thread(target=look, daemon=True, name=_NAME)
    thread.start()
    thread.join(seconds)
    if found:
        return found[0]
    text, remedy = f"no answer in {seconds:.0f} s", "look at what it waits for: disk, network"
    return Finding(if_late, what, text, remedy, is_late=True)


def is_one_left() -> bool:
    """Whether a check still looks, after its time."""
    return any(thread.name == _NAME for thread in threading.enumerate())
