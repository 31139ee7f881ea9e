"""One shard, a webdataset tar file of fixed-length documents: write it, check it, memory-map it."""

import hashlib
import mmap
import os
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from longhaul.datamodules.manifest import ShardEntry

MEMBER_SUFFIX = ".tokens.npy"

Tokens: TypeAlias = NDArray[np.unsignedinteger[Any]]


class ShardError(ValueError):
    """A shard that is missing, short or damaged; the message names it."""

    def __init__(self, message: str) -> None:
        super().__init__(_last_line(message, type(self)))


class UnreadShardError(OSError):
    """A shard that could not be read, though its content may be good; the message names it."""

    def __init__(self, message: str) -> None:
        super().__init__(_last_line(message, type(self)))


def _last_line(message: str, kind: type) -> str:
    # torch raises the exception of a worker again, with the worker's traceback as its message. The
    # last line of that is the message of the worker.
    return message.strip().splitlines()[-1].removeprefix(f"{kind.__module__}.{kind.__name__}: ")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn a missing file into ShardError, and any other error of the file system into OSError."""
    try:
        yield
    except FileNotFoundError as error:
        raise ShardError(f"shard {path}: {error.strerror}") from None
    except OSError as error:
        raise UnreadShardError(f"shard {path}: {error.strerror or error}") from None


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class _HashingFile:
    """A writable file that counts and hashes the bytes written to it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()
        self.bytes = 0

    def write(self, block: bytes) -> int:
        self.sha256.update(block)
        self.bytes += len(block)
        return self._file.write(block)


def temporary_name(path: Path) -> Path:
    """The name of a shard until it is checked; the dot hides it from `*.tar`."""
    return path.with_name(f".{path.name}.tmp")


def write_shard(path: Path, first_document: int, documents: Iterable[Tokens]) -> ShardEntry:
    """Write documents to the temporary name of `path`, read them back, and return the entry.

    The caller renames the file. Its bytes are a pure function of the arguments, because the times
    and owners in the tar headers are fixed.
    """
    # Imported here: webdataset loads torch, and a bad source should be refused before that.
    from webdataset.writer import TarWriter

    temporary = temporary_name(path)
    count = 0
    document: Tokens | None = None
    try:
        with temporary.open("wb") as file:
            hashing = _HashingFile(file)
            with TarWriter(hashing, mtime=0) as writer:
                for count, document in enumerate(documents, start=1):
                    key = f"{first_document + count - 1:09d}"
                    writer.write({"__key__": key, MEMBER_SUFFIX[1:]: document})
            file.flush()
            os.fsync(file.fileno())
        entry = ShardEntry(
            name=path.name, bytes=hashing.bytes, documents=count, sha256=hashing.sha256.hexdigest()
        )
        check_file(temporary, entry)
        assert document is not None, "a shard has at least one document"
        Shard(temporary, entry, document.size, document.dtype)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and not isinstance(error, UnreadShardError):
            # The error of a failing write does not name the file.
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise
    return entry


def check_file(path: Path, entry: ShardEntry) -> None:
    """Raise ShardError unless the file has the size and the hash in the manifest."""
    with reading(path):
        size = path.stat().st_size
        if size != entry.bytes:
            raise ShardError(f"shard {path}: {size} bytes, wanted {entry.bytes}")
        found = sha256_of(path)
    if found != entry.sha256:
        raise ShardError(f"shard {path}: sha256 is {found}, wanted {entry.sha256}")


class Shard:
    """The documents of a shard, memory-mapped: a window only reads the pages that it lies on."""

    def __init__(
        self, path: Path, entry: ShardEntry, document_tokens: int, dtype: np.dtype[Any]
    ) -> None:
        try:
            with reading(path), path.open("rb") as file:
                content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            with reading(path):
                offsets = _index_members(path, content, document_tokens, dtype)
        except tarfile.TarError as error:
            raise ShardError(f"shard {path}: not a readable tar file, {error}") from None
        if len(offsets) != entry.documents:
            raise ShardError(f"shard {path}: {len(offsets)} documents, wanted {entry.documents}")
        if any(offset % dtype.itemsize for offset in offsets):
            raise ShardError(f"shard {path}: tokens do not start at a multiple of their size")
        self._content = content
        self.tokens: Tokens = np.frombuffer(content, dtype, len(content) // dtype.itemsize)
        """The whole file as an array of tokens."""
        self.memory: memoryview = self.tokens.data
        """The same as a memoryview, whose slices are faster than those of numpy."""
        self.starts = [offset // dtype.itemsize for offset in offsets]
        """The index in `tokens` at which each document starts."""

    @property
    def is_intact(self) -> bool:
        """Whether the file still has its length; reading beyond its end would kill the process."""
        return self._content.size() == len(self._content)


def _index_members(
    path: Path, content: mmap.mmap, document_tokens: int, dtype: np.dtype[Any]
) -> list[int]:
    """The byte offset at which the tokens of each document start."""
    offsets = []
    known_header = b""
    with tarfile.open(path, mode="r:") as tar:
        for member in tar:
            if not member.name.endswith(MEMBER_SUFFIX):
                continue
            start = member.offset_data
            # All headers of a shard are equal, and parsing one takes longer than reading a window.
            header = content[start : start + len(known_header)]
            if not known_header or header != known_header:
                known_header = _check_header(
                    content[start : start + min(member.size, 4096)],
                    f"shard {path}: {member.name}",
                    document_tokens,
                    dtype,
                )
            if member.size != len(known_header) + document_tokens * dtype.itemsize:
                raise ShardError(f"shard {path}: {member.name} has {member.size} bytes")
            offsets.append(start + len(known_header))
    return offsets


def _check_header(content: bytes, where: str, document_tokens: int, dtype: np.dtype[Any]) -> bytes:
    """The header of an npy array, which must have this length and type."""
    stream = BytesIO(content)
    try:
        version = np.lib.format.read_magic(stream)
        if version != (1, 0):
            raise ValueError(f"npy version {version}")
        shape, _, found = np.lib.format.read_array_header_1_0(stream)
    except ValueError as error:
        raise ShardError(f"{where} is no npy array, {error}") from None
    if shape != (document_tokens,) or found != dtype:
        wanted = f"({document_tokens},) of {dtype}"
        raise ShardError(f"{where} has shape {shape} of {found}, wanted {wanted}")
    return content[: stream.tell()]
