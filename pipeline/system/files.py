"""Writes small files atomically: a reader sees the old contents or the new."""

import os
from pathlib import Path


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write to a temporary name, flush to disk, rename: a crash leaves the old file or the new."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def flush(path: Path) -> None:
    """Flush a file to disk, or a folder's entries, which are what a rename changes."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
