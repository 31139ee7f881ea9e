"""Ends child processes with their parent."""

import ctypes
import signal
import sys

# Loaded before it is needed, since a forked process should do as little as it can.
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Let this process be sent SIGTERM when the one that started it is killed.

    Otherwise it would go on unseen.
    """
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
