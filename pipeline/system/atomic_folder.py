"""Creates a folder atomically: complete or not at all, and never over files of anybody else."""

import ctypes
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from longhaul.datamodules.files.atomic import flush, naming_the_full
from longhaul.datamodules.files.locks import lock
from longhaul.datamodules.files.untrusted import open_to_write, read_regular, sha256_of, shown

_MOST_LISTED_BYTES = 16 << 20
_HERE, _RENAME_EXCHANGE = -100, 2  # AT_FDCWD, and the flag of Linux's renameat2


def new_or_empty_folder(destination: str | Path, listing: str | None = None) -> Path:
    """The real path of a folder that does not exist or is empty; ValueError for anything else.

    With the name of a listing, a folder may also hold what `write_listing` listed there, unchanged,
    and nothing else: it can be written again, and nothing of anybody's is lost.
    """
    wanted = "wanted a new or empty folder"
    if not str(destination):
        raise ValueError(f"DST: found an empty name, {wanted}")
    target = Path(os.path.realpath(destination))
    if target.exists() and not target.is_dir():
        raise ValueError(f"{destination}: found a file, {wanted}")
    nearest = next(parent for parent in target.parents if parent.exists())
    if not nearest.is_dir():
        raise ValueError(f"{destination}: found the file {nearest} in its path, {wanted}")
    entries = list(target.iterdir()) if target.exists() else []
    if entries and (listing is None or not (target / listing).is_file()):
        raise ValueError(f"{destination}: found {len(entries)} entries, {wanted}")
    if target.is_mount():
        raise ValueError(f"{destination}: found a mount point, {wanted}")
    if entries and listing is not None:
        _check_as_listed(target, entries, listing)
    return target


def write_listing(folder: Path, listing: str) -> None:
    """List the hashes of all files of a folder, in the format of `sha256sum`."""
    paths = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    lines = [f"{sha256_of(path)}  {path.name}\n" for path in paths]
    (folder / listing).write_text("".join(lines), encoding="utf-8")


def _check_as_listed(folder: Path, entries: Sequence[Path], listing: str) -> None:
    text = read_regular(folder / listing, _MOST_LISTED_BYTES).decode(errors="replace")
    hashes = {
        name: digest for digest, _, name in (one.partition("  ") for one in text.splitlines())
    }
    for path in sorted(entries):
        if path.name == listing and not path.is_symlink():
            continue
        if path.is_symlink() or not path.is_file() or sha256_of(path) != hashes.get(path.name):
            raise ValueError(
                f"{folder}: found {shown(path.name)}, which {listing} does not list as it is now; "
                "wanted a new or empty folder, or one that nobody changed since it was written"
            )


@contextmanager
def atomic_folder(target: Path, listing: str | None = None) -> Iterator[Path]:
    """Context with a temporary folder, renamed to the target when the context ends without error.

    A target that `listing` lists is exchanged for it in one step, and removed.

    Args:
        target: from `new_or_empty_folder`. The temporary folder is beside it.
        listing: as there.

    Raises:
        OSError: the folder cannot be written, another process is writing it, something was put
            into the target in the meantime, or a link has the name of the temporary folder. That of
            a full disk names the target.
    """
    temporary = target.with_name(f".{target.name}.unfinished")
    with suppress(FileExistsError):
        temporary.mkdir(parents=True)
    # All in it is removed. Someone else may have made a link of this name to a folder of the user.
    if temporary.is_symlink() or not temporary.is_dir():
        found = f"a link to {shown(os.readlink(temporary))}" if temporary.is_symlink() else "a file"
        raise OSError(f"{temporary}: found {found}, wanted a folder or nothing; remove it")
    locked = temporary / ".lock"
    with naming_the_full(target), open(open_to_write(locked, os.O_WRONLY), "w") as file:
        if not lock(file.fileno()):
            raise OSError(f"{target}: found another process writing it, wanted one at a time")
        try:
            # Remove what a killed process left behind.
            for entry in temporary.iterdir():
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                elif entry != locked:
                    entry.unlink()
            yield temporary
            for path in sorted(temporary.iterdir()):
                flush(path)
            locked.unlink()  # Last: without it another process may begin.
            flush(temporary)
            if listing is not None and target.is_dir() and any(target.iterdir()):
                new_or_empty_folder(target, listing)  # Somebody may have put something there.
                _exchange(temporary, target)
                shutil.rmtree(temporary)
            else:
                os.rename(temporary, target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    flush(target.parent)


def _exchange(one: Path, other: Path) -> None:
    """Let two folders of one parent change places.

    In one step on Linux, where file systems can do that; elsewhere in three, between which `other`
    is not there for a moment.
    """
    swap = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    paths = os.fsencode(one), os.fsencode(other)
    if swap and not swap(_HERE, paths[0], _HERE, paths[1], _RENAME_EXCHANGE):
        return
    aside = other.with_name(f".{other.name}.previous")
    os.rename(other, aside)
    try:
        os.rename(one, other)
    except BaseException:
        os.rename(aside, other)
        raise
    os.rename(aside, one)
