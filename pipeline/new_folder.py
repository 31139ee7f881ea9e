"""A folder that appears whole or not at all, and never over anything."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from longhaul.pipeline.checkpoint_files import sync_folder


def free_folder(destination: str | Path) -> Path:
    """The real path of a folder that is not there yet, or empty; ValueError for anything else."""
    target = Path(os.path.realpath(destination))
    if target.exists() and not target.is_dir():
        raise ValueError(f"{destination}: found a file, wanted a new or empty folder")
    if target.exists() and (entries := len(list(target.iterdir()))):
        raise ValueError(f"{destination}: found {entries} entries, wanted a new or empty folder")
    if target.is_mount():
        raise ValueError(f"{destination}: found a mount point, wanted a new or empty folder")
    return target


@contextmanager
def appearing(target: Path) -> Iterator[Path]:
    """A folder beside the target to write files into, which gets its name when the block ends well.

    Args:
        target: from `free_folder`.

    Raises:
        OSError: it could not be written, or something was put into the target meanwhile.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.unfinished")
    try:
        # What a process left that was killed.
        if temporary.exists():
            shutil.rmtree(temporary)
        temporary.mkdir()
        yield temporary
        for path in (*sorted(temporary.iterdir()), temporary):
            sync_folder(path)  # which flushes a file likewise
        os.rename(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_folder(target.parent)
