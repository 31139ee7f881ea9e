"""One shard, a webdataset tar file of blocks of one length: write it, check it, memory-map it."""

import hashlib
import json
import mmap
import os
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from longhaul.datamodules.files.atomic import whole_file
from longhaul.datamodules.files.locks import hold
from longhaul.datamodules.files.untrusted import one_line, open_regular, sha256_of, shown
from longhaul.datamodules.manifest import ShardEntry

MEMBER_SUFFIX = ".tokens.npy"
ENDS_SUFFIX = ".ends.npy"
TEXTS_SUFFIX = ".texts.json"

_TAR_BLOCK_BYTES = 512
_PLAIN_TYPES = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE)
_NPY_MAGIC = np.lib.format.magic(1, 0)
_NPY_HEADER_BYTES = 1024

Tokens: TypeAlias = NDArray[np.unsignedinteger[Any]]
Ends: TypeAlias = NDArray[np.uint32]

_ENDS_DTYPE = np.dtype("<u4")


class Block(NamedTuple):
    """The tokens of a block, and the documents in it."""

    tokens: Tokens
    ends: Ends | None = None
    """How many tokens lie before the end of each document, ascending; the last is the block's
    length. None where the documents are not known."""
    texts: Sequence[tuple[str, int]] | None = None
    """The name of each document, and the number of its first token here among all its tokens."""


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
    """Turn a missing or special file into ShardError, other errors of reading into OSError."""
    try:
        yield
    except ShardError:
        raise
    except ValueError as error:
        raise ShardError(f"shard {error}") from None
    except FileNotFoundError as error:
        raise ShardError(f"shard {path}: {error.strerror}") from None
    except OSError as error:
        raise UnreadShardError(f"shard {path}: {error.strerror or error}") from None


class _HashingFile:
    """A writable file that hashes the bytes written to it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()

    def write(self, block: bytes) -> int:
        self.sha256.update(block)
        return self._file.write(block)


@contextmanager
def new_shard(
    path: Path, first_block: int, blocks: Iterable[Block], vocab_size: int
) -> Iterator[ShardEntry]:
    """Context with the entry of a shard, which is written and read back, and not yet at `path`.

    It is there when the context ends without an error. Its bytes are a pure function of the
    arguments, because the times and owners in the tar headers are fixed. Every id must be below
    `vocab_size`.
    """
    # Imported here: webdataset loads torch, and a bad source should be refused before that.
    from webdataset.writer import TarWriter

    count = 0
    block: Block | None = None
    try:
        with whole_file(path) as file:
            hashing = _HashingFile(file)
            with TarWriter(hashing, mtime=0) as writer:
                for count, block in enumerate(blocks, start=1):
                    key = f"{first_block + count - 1:09d}"
                    member = {"__key__": key, MEMBER_SUFFIX[1:]: block.tokens}
                    if block.ends is not None:
                        member[ENDS_SUFFIX[1:]] = block.ends.astype(_ENDS_DTYPE)
                    if block.texts is not None:
                        member[TEXTS_SUFFIX[1:]] = json.dumps(block.texts).encode()
                    writer.write(member)
            file.flush()
            sha256 = hashing.sha256.hexdigest()
            entry = ShardEntry(name=path.name, bytes=file.tell(), documents=count, sha256=sha256)
            written = Path(file.name)
            check_file(written, entry)
            assert block is not None, "a shard has at least one block"
            tokens, ends, _ = block
            shard = Shard(written, entry, tokens.size, tokens.dtype, has_ends=ends is not None)
            shard.check_content(vocab_size)
            yield entry
    except UnreadShardError:
        raise
    except OSError as error:
        # The error of a failing write does not name the file.
        raise OSError(error.errno, error.strerror, str(path)) from None


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
    """The blocks of a shard, memory-mapped: a window only reads the pages that it lies on."""

    def __init__(
        self,
        path: Path,
        entry: ShardEntry,
        block_tokens: int,
        dtype: np.dtype[Any],
        *,
        has_ends: bool = False,
        is_held: bool = False,
    ) -> None:
        """`is_held`: whether the file is held while it is mapped, so that a cache keeps it."""
        with reading(path):
            with open_regular(path) as file:
                if is_held:
                    # The map has a copy of the handle, and with it the lock.
                    hold(file.fileno(), alone=False)
                size = os.fstat(file.fileno()).st_size
                if size != entry.bytes:
                    raise ShardError(f"shard {path}: {size} bytes, wanted {entry.bytes}")
                content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            offsets, ends, texts = _index_members(path, content, block_tokens, dtype)
        if len(offsets) != entry.documents:
            raise ShardError(f"shard {path}: {len(offsets)} blocks, wanted {entry.documents}")
        if has_ends and len(ends) != len(offsets):
            raise ShardError(
                f"shard {path}: {len(ends)} members *{ENDS_SUFFIX}, wanted one for each of "
                f"{len(offsets)} blocks"
            )
        if texts and len(texts) != len(offsets):
            raise ShardError(
                f"shard {path}: {len(texts)} members *{TEXTS_SUFFIX}, wanted one for each of "
                f"{len(offsets)} blocks, or none"
            )
        if any(offset % dtype.itemsize for offset in offsets):
            raise ShardError(f"shard {path}: tokens do not start at a multiple of their size")
        self._path = path
        self._block_tokens = block_tokens
        self._content = content
        self.tokens: Tokens = np.frombuffer(content, dtype, len(content) // dtype.itemsize)
        """The whole file as an array of tokens."""
        self.memory: memoryview = self.tokens.data
        """The same as a memoryview, whose slices are faster than those of numpy."""
        self.starts = [offset // dtype.itemsize for offset in offsets]
        """The index in `tokens` at which each block starts."""
        self.ends = ends if has_ends else []
        """The ends of the documents of each block; empty where they are not known."""
        self._texts = texts

    def texts(self, number: int) -> list[tuple[str, int]] | None:
        """Of each document in a block its name, and the number of its first token here within it.

        None if it was prepared without names. Raises ShardError if the member is damaged.
        """
        if not self._texts:
            return None
        where = f"shard {self._path}: {TEXTS_SUFFIX} of block {number}"
        try:
            # Not by a schema of pydantic's, which takes no name of a file that is not UTF-8.
            found = json.loads(self._content[self._texts[number]])
            texts = [(name, first) for name, first in found]
        except (ValueError, TypeError, RecursionError) as error:
            raise ShardError(f"{where}: found no pairs, {one_line(error)}") from None
        for name, first in texts:
            if not isinstance(name, str) or type(first) is not int or not 0 <= first < 1 << 60:
                raise ShardError(f"{where}: found {shown([name, first])}, wanted name and number")
        if self.ends and len(texts) != len(self.ends[number]):
            raise ShardError(f"{where}: {len(texts)} documents, wanted {len(self.ends[number])}")
        return texts

    @property
    def is_intact(self) -> bool:
        """Whether the file still has its length; reading beyond its end would kill the process."""
        return self._content.size() == len(self._content)

    def check_content(self, vocab_size: int) -> None:
        """Raise ShardError at an id that is not below `vocab_size`, or at ends that do not ascend
        to the block's length. This reads the whole file."""
        for number, ends in enumerate(self.ends):
            ascend = ends[0] > 0 and (ends[1:] > ends[:-1]).all()
            if not ascend or ends[-1] != self._block_tokens:
                raise ShardError(
                    f"shard {self._path}: the ends of block {number} do not ascend to "
                    f"{self._block_tokens}, the length of the block"
                )
        if vocab_size > np.iinfo(self.tokens.dtype).max:
            return
        for number, start in enumerate(self.starts):
            largest = int(self.tokens[start : start + self._block_tokens].max())
            if largest >= vocab_size:
                raise ShardError(
                    f"shard {self._path}: id {largest} in block {number}, wanted ids below "
                    f"the manifest's vocab_size, {vocab_size}"
                )


def _index_members(
    path: Path, content: mmap.mmap, block_tokens: int, dtype: np.dtype[Any]
) -> tuple[list[int], list[Ends], list[slice]]:
    """Where the tokens of each block start, the ends of its documents, and where their names are.

    Headers are read one tar block at a time. tarfile's own loop would also follow extended headers,
    which may ask for any amount of memory; no shard has them.
    """
    offsets, ends, texts = list[int](), list[Ends](), list[slice]()
    known_header = b""
    at = 0
    while header_block := content[at : at + _TAR_BLOCK_BYTES]:
        try:
            member = tarfile.TarInfo.frombuf(header_block, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            if not header_block.strip(b"\0"):
                break
            raise ShardError(f"shard {path}: not a readable tar file, {error}") from None
        start = at + _TAR_BLOCK_BYTES
        if member.type not in _PLAIN_TYPES or not 0 <= member.size <= len(content) - start:
            raise ShardError(
                f"shard {path}: {shown(member.name)} has type {shown(member.type)} and "
                f"{shown(member.size)} bytes, wanted a plain file that ends within the shard"
            )
        at = start + -(-member.size // _TAR_BLOCK_BYTES) * _TAR_BLOCK_BYTES
        where = f"shard {path}: {shown(member.name)}"
        if member.name.endswith(ENDS_SUFFIX):
            piece = content[start : start + member.size]
            header = _check_header(piece, where, None, _ENDS_DTYPE)
            ends.append(np.frombuffer(piece, _ENDS_DTYPE, offset=len(header)))
        if member.name.endswith(TEXTS_SUFFIX):
            texts.append(slice(start, start + member.size))
        if not member.name.endswith(MEMBER_SUFFIX):
            continue
        # All headers of a shard are equal, and parsing one takes longer than reading a window.
        header = content[start : start + len(known_header)]
        if not known_header or header != known_header:
            known_header = _check_header(
                content[start : start + min(member.size, _NPY_HEADER_BYTES)],
                where,
                block_tokens,
                dtype,
            )
        if member.size != len(known_header) + block_tokens * dtype.itemsize:
            raise ShardError(f"{where} has {member.size} bytes")
        offsets.append(start + len(known_header))
    return offsets, ends, texts


def _check_header(content: bytes, where: str, length: int | None, dtype: np.dtype[Any]) -> bytes:
    """The header of an npy array, which must have this length and type.

    Without a length, `content` is the whole array, and has one number at least.

    It is compared and not parsed: numpy's own reader evaluates it as a Python literal.
    """
    start = len(_NPY_MAGIC) + 2
    end = start + int.from_bytes(content[len(_NPY_MAGIC) : start], "little")
    if not content.startswith(_NPY_MAGIC) or end > len(content):
        raise ShardError(f"{where} is no npy array of one dimension")
    found = content[start:end].rstrip().decode("latin-1")
    if length is None:
        length, rest = divmod(len(content) - end, dtype.itemsize)
        if rest or not length:
            raise ShardError(f"{where} has {len(content)} bytes")
    wanted = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': ({length},), }}"
    if found != wanted:
        raise ShardError(f"{where}: found an array with {found[:100]!r}, wanted {wanted!r}")
    return content[:end]
