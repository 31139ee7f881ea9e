"""A check of `longhaul doctor`, run within a time limit, and its finding."""

import threading
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

from longhaul.datamodules.files.untrusted import one_line

Status: TypeAlias = Literal["ok", "warning", "FAILURE"]

Fault: TypeAlias = Literal["machine", "input", "either"]
"""The cause of a failure. "machine": the run may work on another machine. "input": the run fails on
every machine. "either": "input" if all nodes have the failure, otherwise "machine"."""


class Finding(NamedTuple):
    """One line that `longhaul doctor` prints."""

    status: Status
    subject: str
    """What was checked, in one word."""

    text: str
    remedy: str = ""
    fault: Fault = "machine"
    has_timed_out: bool = False
    """There was no answer within the time limit."""

    def __str__(self) -> str:
        line = f"{self.status:<8} {self.subject:<9} {self.text}"
        return f"{line}; {self.remedy}" if self.remedy else line


Check: TypeAlias = Callable[[], Finding]

_NAME = "longhaul check"


def run_check(
    subject: str, check: Check, seconds: float, *, if_timed_out: Status = "warning"
) -> Finding:
    """Run a check and return its finding; an exception is a failure.

    Args:
        subject: what is checked.
        check: the check.
        seconds: the time limit.
        if_timed_out: the status of a check without an answer in time. A shared file system that is
            slow for a moment should not end a run, and training's watchdog notices one that hangs.
    """
    findings: list[Finding] = []

    def run() -> None:
        try:
            findings.append(check())
        except Exception as error:
            text = f"{type(error).__name__}: {one_line(error)}"
            findings.append(Finding("FAILURE", subject, text))

    # In a thread, because a call into a file system or driver that hangs cannot be interrupted,
    # only left behind.
    thread = threading.Thread(target=run, daemon=True, name=_NAME)
    thread.start()
    thread.join(seconds)
    if findings:
        return findings[0]
    text, remedy = f"no answer in {seconds:.0f} s", "find what it waits for: disk, network"
    return Finding(if_timed_out, subject, text, remedy, has_timed_out=True)


def is_a_check_running() -> bool:
    """Whether a check still runs after its time limit."""
    return any(thread.name == _NAME for thread in threading.enumerate())
