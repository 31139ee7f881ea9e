"""Writes files atomically: a reader sees the old contents or the new."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedWriter
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Numbers of the errors of a disk without space, or of a user who has used up theirs."""


@contextmanager
def whole_file(path: Path) -> Iterator[BufferedWriter]:
    """Context with a new file that takes the place of `path` when it ends without an error.

    By then it is flushed to disk: a crash leaves the old file or the new. What a killed process
    leaves is called `.*.tmp`. The error of a full disk names `path`. A device is
    refused: as root, a file would take the place of /dev/null.
    """
    if not path.is_symlink() and (path.is_char_device() or path.is_block_device()):
        raise OSError(errno.EINVAL, "it is a device, wanted a file", str(path))
    # The name is new on all nodes. Should there be something, it is neither followed nor emptied.
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
    # Closing the file writes again what could not be written, and fails again.
    with naming_the_full(path), temporary.open("xb") as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise


@contextmanager
def naming_the_full(path: Path) -> Iterator[None]:
    """Context in which the error of a full disk, which names no file when a write fails, names
    this one."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file as `whole_file` does.

    Raises OSError, one line with the file's name, if it cannot be written.
    """
    try:
        with whole_file(path) as file:
            file.write(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise OSError(f"{path} cannot be written: {error.strerror or error}") from error


def flush(path: Path) -> None:
    """Flush a file to disk; of a folder, its entries, which a rename changes."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
