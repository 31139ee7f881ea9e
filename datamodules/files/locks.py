"""File locks: one holder at a time among all processes on all nodes that share the file system.

The locks are POSIX's. Unlike flock's, data loader workers do not inherit them, which may outlive a
killed trainer by seconds, and they can be queried without being taken. But a process excludes
neither its own threads nor itself, and loses its lock when it closes any handle of the file.

A cache needs what `hold` takes, flock's: threads exclude each other, a file may be held by several
that only read it, and a memory map holds it on.
"""

import fcntl
import os
import struct
from pathlib import Path

_FLOCK = "hhqqi4x"  # struct flock of Linux on 64 bits: type, whence, start, len, pid


def lock(handle: int, *, waits: bool = False) -> bool:
    """Lock a file that is open for writing, until it is closed or the process ends.

    False if another process has the lock, unless this one waits for it. OSError if the file system
    has no locks, as some over networks.
    """
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # POSIX allows both
        return False
    return True


def is_locked(path: Path) -> bool:
    """Whether another process on any node holds the lock. The question itself never holds it."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        asked = struct.pack(_FLOCK, fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
        try:
            answer = fcntl.fcntl(file, fcntl.F_GETLK, asked)
        except OSError:  # a file system without locks
            return False
    return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)


def hold(handle: int, *, alone: bool, waits: bool = True) -> bool:
    """Hold an open file, until the handle and all memory maps made of it are closed.

    Args:
        handle: of the file; over a network it must be open for writing to be held alone.
        alone: whether nobody else may hold it.
        waits: until it can be held.

    False if others hold it, unless this one waits. OSError if the file system has no locks.
    """
    kind = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
    try:
        fcntl.flock(handle, kind if waits else kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
