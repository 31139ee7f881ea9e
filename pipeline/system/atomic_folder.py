"""Creates a folder atomically: complete or not at all, and never over existing files."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from longhaul.pipeline.system.files import flush


def new_or_empty_folder(destination: str | Path) -> Path:
    """The real path of a folder that does not exist or is empty; ValueError for anything else."""
    if not str(destination):
        raise ValueError("DST: found an empty name, wanted a new or empty folder")
    target = Path(os.path.realpath(destination))
    if target.exists() and not target.is_dir():
        raise ValueError(f"{destination}: found a file, wanted a new or empty folder")
    if target.exists() and (entries := len(list(target.iterdir()))):
        raise ValueError(f"{destination}: found {entries} entries, wanted a new or empty folder")
    if target.is_mount():
        raise ValueError(f"{destination}: found a mount point, wanted a new or empty folder")
    return target


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Context with a temporary folder, renamed to the target when the context ends without error.

    Args:
        target: from `new_or_empty_folder`. The temporary folder is beside it.

    Raises:
        OSError: the folder cannot be written, another process is writing it, or something was put
            into the target in the meantime.
    """
    temporary = target.with_name(f".{target.name}.unfinished")
    temporary.mkdir(parents=True, exist_ok=True)
    lock = temporary / ".lock"
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(
                f"{target}: found another process writing it, wanted one at a time"
            ) from None
        try:
            # Remove what a killed process left behind.
            for entry in temporary.iterdir():
                if entry.is_dir():
                    shutil.rmtree(entry)
                elif entry != lock:
                    entry.unlink()
            yield temporary
            lock.unlink()
            for path in (*sorted(temporary.iterdir()), temporary):
                flush(path)
            os.rename(temporary, target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    flush(target.parent)
