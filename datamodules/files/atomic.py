"""Writes small files atomically: a reader sees the old contents or the new."""

import os
from contextlib import suppress
from pathlib import Path


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write to a temporary name, flush to disk, rename: a crash leaves the old file or the new.

    Raises OSError, one line with the file's name, if it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        # Something else of this name is what a killed process left, or a link to be followed.
        temporary.unlink(missing_ok=True)
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            raise OSError(f"{path} cannot be written: {error.strerror or error}") from error
        raise


def flush(path: Path) -> None:
    """Flush a file to disk, or a folder's entries, which are what a rename changes."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
