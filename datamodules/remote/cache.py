"""A folder of copies of remote files, which removes copies that nobody has used for long.

Any number of processes use it at a time. Beside a copy lies a record: which file it is (inode,
size and time) and its SHA-256. So a copy is fetched and hashed once a node: who finds a record that
fits the file believes it. Only a file with such a record, which the cache has written itself, is
ever removed, and none that a process of this node holds.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from io import BufferedReader, BufferedWriter
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field

from longhaul.datamodules.files.atomic import whole_file, write_atomically
from longhaul.datamodules.files.locks import hold
from longhaul.datamodules.files.untrusted import (
    Sha256,
    open_regular,
    open_to_write,
    parse_json,
    read_regular,
)
from longhaul.datamodules.remote.reading import ContentError, blocks, retrying

_ATTEMPTS = 6
_RECORD = ".json"
_MOST_RECORD_BYTES = 4096
_RECORDS = re.compile(rf"[0-9a-f]{{32}}-.*\{_RECORD}")
# As whole_file names what it has not finished.
_UNFINISHED = re.compile(r"\.[0-9a-f]{32}-.*\.[0-9a-f]{8}\.tmp")
# Held while room is made and while a copy gets its name; never while anything is read from afar.
_FOLDER_LOCK = "cache.lock"


class RemoteFile(NamedTuple):
    """A file and what it must hold."""

    url: str
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class _Record:
    inode: Annotated[int, Field(ge=0)]
    bytes: Annotated[int, Field(ge=0)]
    mtime_ns: int
    sha256: Sha256


class Cache:
    """Copies of remote files in a folder.

    Args:
        folder: of the copies; it is made when the first one is fetched.
        most_bytes: bytes that the copies may have together, those being fetched included; None: any
            number. To fetch another one, copies are removed, those first whose last use is longest
            ago.
    """

    def __init__(self, folder: Path, most_bytes: int | None) -> None:
        self._folder = folder
        self._most_bytes = most_bytes
        # Copies without a record, which others have put there, by name.
        self._hashed: dict[str, tuple[tuple[int, int, int], str]] = {}

    @contextmanager
    def copy_of(self, file: RemoteFile) -> Iterator[Path]:
        """Context with the path of a copy that holds what it must, and which nobody removes.

        Of all processes one fetches it, and the others wait.

        Raises:
            MissingInputError, ContentError, ValueError, OSError: as of `retrying`.
            OSError: the folder cannot be used, or there is no room in it.
        """
        path = self._path_of(file)
        self._folder.mkdir(parents=True, exist_ok=True)
        while True:
            with _held(path) as copy:
                # Not in the lock, since it may have to read the whole file.
                if copy is not None and self._is_intact(path, copy, file):
                    with suppress(OSError):
                        os.utime(_record_of(path))  # which is the time of its last use
                    yield path
                    return
                before = None if copy is None else _identity(copy.fileno())
            with _alone(path.with_name(f"{path.name}.lock")):
                # Otherwise another process has fetched it in the meantime.
                if _identity(path) == before:
                    self._fetch(file, path, _ATTEMPTS)

    def fetch_ahead(self, file: RemoteFile) -> None:
        """Fetch a file that will be read soon, unless it is there or somebody fetches it.

        Raises any error of the store; OSError if there is no room.
        """
        path = self._path_of(file)
        self._folder.mkdir(parents=True, exist_ok=True)
        if _identity(path) is not None:
            with suppress(OSError):
                os.utime(_record_of(path))
            return
        with _alone(path.with_name(f"{path.name}.lock"), waits=False) as is_mine:
            if is_mine and _identity(path) is None:
                self._fetch(file, path, 1)

    def _path_of(self, file: RemoteFile) -> Path:
        # With a hash of the whole URL: shards of one name from two sources do not collide.
        name = re.sub(r"[^A-Za-z0-9._-]", "_", file.url.rsplit("/", 1)[-1])[-80:]
        return self._folder / f"{hashlib.sha256(file.url.encode()).hexdigest()[:32]}-{name}"

    def _is_intact(self, path: Path, copy: BufferedReader, file: RemoteFile) -> bool:
        identity = _identity(copy.fileno())
        assert identity is not None
        record = _read_record(path)
        if record is not None and _fits(record, identity):
            return record.sha256 == file.sha256
        if self._hashed.get(path.name, (None, ""))[0] != identity:
            digest = hashlib.file_digest(copy, "sha256").hexdigest()
            self._hashed[path.name] = identity, digest
        return self._hashed[path.name][1] == file.sha256

    def _fetch(self, file: RemoteFile, path: Path, attempts: int) -> None:
        with ExitStack() as stack:
            with _alone(self._folder / _FOLDER_LOCK):
                self._make_room(file.bytes)
                copy = stack.enter_context(whole_file(path))
                hold(copy.fileno(), alone=True)
                # Others see at once how much room it will take.
                copy.truncate(file.bytes)
            retrying(file.url, lambda: _download(file, copy), attempts=attempts)
            os.fsync(copy.fileno())
            with _alone(self._folder / _FOLDER_LOCK):
                # First, so that there is no copy of the cache's own without a record.
                _write_record(path, copy.fileno(), file.sha256)
                stack.close()

    def _make_room(self, needed: int) -> None:
        """Remove what is no more needed, such that there is room; in the folder's lock."""
        total, copies = needed, []
        for entry in os.scandir(self._folder):
            if _UNFINISHED.fullmatch(entry.name):
                total += _bytes_unless_abandoned(Path(entry.path))
            elif self._most_bytes is not None and _RECORDS.fullmatch(entry.name):
                path = self._folder / entry.name.removesuffix(_RECORD)
                if (identity := _identity(path)) is None:
                    os.unlink(entry)
                else:
                    copies.append((entry.stat().st_mtime_ns, identity[1], path))
                    total += identity[1]
        if self._most_bytes is None:
            return
        for _, size, path in sorted(copies):
            if total <= self._most_bytes:
                return
            if _remove(path):
                total -= size
        if total > self._most_bytes:
            raise OSError(
                f"data.cache_bytes: found {self._most_bytes:,}, wanted {total:,} or more: "
                f"{needed:,} for this file, {total - needed:,} in use by processes of this node"
            )


def _download(file: RemoteFile, copy: BufferedWriter) -> None:
    hashing = hashlib.sha256()
    copy.seek(0)
    for block in blocks(file.url):
        hashing.update(block)
        if copy.tell() + len(block) > file.bytes:
            raise ContentError(f"more than the {file.bytes:,} bytes in the manifest")
        copy.write(block)
    if copy.tell() != file.bytes:
        raise ContentError(f"{copy.tell():,} bytes received, wanted {file.bytes:,}")
    if (digest := hashing.hexdigest()) != file.sha256:
        raise ContentError(f"sha256 is {digest}, wanted {file.sha256}")
    copy.flush()


def _record_of(path: Path) -> Path:
    return path.with_name(f"{path.name}{_RECORD}")


def _identity(file: Path | int) -> tuple[int, int, int] | None:
    """Inode, size and time: another file in this place has others. None without a file."""
    try:
        status = os.stat(file)
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _fits(record: _Record, identity: tuple[int, int, int] | None) -> bool:
    return (record.inode, record.bytes, record.mtime_ns) == identity


def _read_record(path: Path) -> _Record | None:
    try:
        record = _record_of(path)
        return parse_json(_Record, read_regular(record, _MOST_RECORD_BYTES), record)
    except (FileNotFoundError, ValueError):
        return None


def _write_record(path: Path, handle: int, sha256: str) -> None:
    status = os.fstat(handle)
    record = _Record(
        inode=status.st_ino, bytes=status.st_size, mtime_ns=status.st_mtime_ns, sha256=sha256
    )
    write_atomically(_record_of(path), json.dumps(asdict(record)))


@contextmanager
def _held(path: Path) -> Iterator[BufferedReader | None]:
    """Context with an open file, which nobody removes meanwhile; None if it is not there."""
    try:
        file = open_regular(path)
    except FileNotFoundError:
        yield None
        return
    with file:
        hold(file.fileno(), alone=False)
        # It may have been removed before it was held.
        yield file if _identity(path) == _identity(file.fileno()) else None


@contextmanager
def _alone(path: Path, *, waits: bool = True) -> Iterator[bool]:
    """Context in which no other process and no other thread is; False if it does not wait."""
    with open(open_to_write(path, os.O_WRONLY), "wb") as file:
        yield hold(file.fileno(), alone=True, waits=waits)


def _remove(path: Path) -> bool:
    """Remove a copy unless it is held or is not the cache's own. Returns whether it is gone."""
    with ExitStack() as stack:
        try:
            handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            stack.callback(os.close, handle)
            if not hold(handle, alone=True, waits=False):
                return False
            record = _read_record(path)
            if record is None or not _fits(record, _identity(handle)):
                return False
            path.unlink()
            _record_of(path).unlink()
        except OSError:
            return False
    return True


def _bytes_unless_abandoned(path: Path) -> int:
    """The size of an unfinished file; one whose process was killed is removed."""
    # One whose fetch fails is removed at any time.
    with suppress(FileNotFoundError), path.open("rb+") as file:
        if not hold(file.fileno(), alone=True, waits=False):
            return os.fstat(file.fileno()).st_size
        path.unlink()
    return 0
