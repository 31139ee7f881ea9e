"""The documents of a unit as a file, which appears whole: tokens, then what is known of each."""

import os
import struct
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from longhaul.datamodules.files.atomic import whole_file
from longhaul.datamodules.files.untrusted import open_regular
from longhaul.datamodules.preparation.documents import Document
from longhaul.datamodules.preparation.source_files import in_validation
from longhaul.datamodules.shards import Tokens

ENDING = ".unit"

_MAGIC = b"LHUNIT01"
# The magic; bytes of a token, documents, tokens, bytes of all names; empty documents for training
# and for validation.
_TRAILER = struct.Struct("<8sQQQQQQ")
_READ_TOKENS = 1 << 20
_COPIED_BYTES = 1 << 20


@dataclass(frozen=True)
class UnitForm:
    """How documents become the content of a unit file."""

    dtype: str
    """`uint16` or `uint32`."""
    eot_id: int
    """The id that ends each document."""
    validation_fraction: float
    """Share of the documents whose names choose them for validation."""


def write_unit(
    path: Path,
    documents: Iterable[Document],
    form: UnitForm,
    progress: Callable[[int], None] = lambda tokens: None,
) -> int:
    """Write the documents of a unit; return the number of their tokens.

    The tokens stream to the file. In memory are 17 bytes a document.

    Args:
        progress: called with the number of tokens so far, again and again.
    """
    dtype = np.dtype(form.dtype).newbyteorder("<")
    eot = np.array([form.eot_id], dtype).tobytes()
    ends, name_ends, parts = array("Q"), array("Q"), bytearray()
    empty = [0, 0]
    written = shown = 0
    with whole_file(path) as file, TemporaryFile(dir=path.parent) as names:
        for document in documents:
            before = written
            for piece in document.pieces():
                file.write(piece.astype(dtype).tobytes())
                written += piece.size
                if written - shown >= _READ_TOKENS:
                    shown = written
                    progress(written)
            is_validation = document.is_validation
            if is_validation is None:
                is_validation = in_validation(document.name, form.validation_fraction)
            if written == before:
                empty[is_validation] += 1
                continue
            file.write(eot)
            written += 1
            ends.append(written)
            parts.append(is_validation)
            name_ends.append(
                (name_ends[-1] if name_ends else 0)
                + names.write(document.name.encode(errors="surrogateescape"))
            )
        # So that the numbers below lie at multiples of their size.
        file.write(bytes(-written * dtype.itemsize % 8))
        for numbers in (ends, name_ends):
            file.write(np.asarray(numbers, "<u8").tobytes())
        file.write(parts)
        names.seek(0)
        while block := names.read(_COPIED_BYTES):
            file.write(block)
        sizes = (dtype.itemsize, len(ends), written, name_ends[-1] if name_ends else 0)
        file.write(_TRAILER.pack(_MAGIC, *sizes, *empty))
    return written


class UnitSizes(NamedTuple):
    """What the end of a unit file says about it."""

    token_bytes: int
    documents: int
    tokens: int
    """With the end of each document."""
    name_bytes: int
    empty: tuple[int, int]
    """Documents without a token, for training and for validation, which are not there."""


def unit_sizes(path: Path) -> UnitSizes:
    """Read the sizes of a unit file. ValueError if it is none, or is not whole."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - _TRAILER.size))
        content = file.read(_TRAILER.size)
    if len(content) == _TRAILER.size and content.startswith(_MAGIC):
        _, token_bytes, documents, tokens, name_bytes, *empty = _TRAILER.unpack(content)
        padded = -(-tokens * token_bytes // 8) * 8
        if token_bytes in (2, 4) and size == padded + 17 * documents + name_bytes + len(content):
            return UnitSizes(token_bytes, documents, tokens, name_bytes, (empty[0], empty[1]))
    raise ValueError(f"{path}: found no whole unit of a preparation; remove the file")


class UnitFile:
    """A unit file that is read."""

    def __init__(self, path: Path) -> None:
        sizes = unit_sizes(path)
        self._dtype = np.dtype(f"<u{sizes.token_bytes}")
        at = -(-sizes.tokens * sizes.token_bytes // 8) * 8
        count = sizes.documents
        self.ends: NDArray[np.uint64] = _mapped(path, "<u8", at, count)
        """The number of tokens before the end of each document, its end-of-text id included."""
        self._name_ends = _mapped(path, "<u8", at + 8 * count, count)
        self.is_validation: NDArray[np.bool_] = _mapped(path, "u1", at + 16 * count, count) != 0
        """Of each document."""
        self._names = _mapped(path, "u1", at + 17 * count, sizes.name_bytes)
        for numbers, last in ((self.ends, sizes.tokens), (self._name_ends, sizes.name_bytes)):
            if count and (numbers[-1] != last or (numbers[1:] < numbers[:-1]).any()):
                raise ValueError(f"{path}: found ends that do not ascend; remove the file")
        self.lengths: NDArray[np.uint64] = np.diff(self.ends, prepend=np.uint64(0))
        """Tokens of each document, its end-of-text id included."""
        self._path = path
        self._tokens = sizes.tokens
        self._first = 0
        self._buffer: Tokens = np.empty(0, self._dtype)

    def name(self, number: int) -> str:
        """The name of a document."""
        start = int(self._name_ends[number - 1]) if number else 0
        return bytes(self._names[start : int(self._name_ends[number])]).decode(
            errors="surrogateescape"
        )

    def tokens(self, start: int, stop: int) -> Tokens:
        """The tokens from `start` to before `stop`. They are valid until the next call."""
        if not self._first <= start <= stop <= self._first + self._buffer.size:
            # Read and not mapped, so that large units do not count as memory of the process.
            count = min(max(stop - start, _READ_TOKENS), self._tokens - start)
            offset = start * self._dtype.itemsize
            self._buffer = np.fromfile(self._path, self._dtype, count, offset=offset)
            self._first = start
            if self._buffer.size != count:
                raise ValueError(f"{self._path}: found a file that became shorter")
        return self._buffer[start - self._first : stop - self._first]


def _mapped(path: Path, kind: str, offset: int, count: int) -> Any:
    if not count:
        return np.empty(0, kind)
    return np.memmap(path, kind, "r", offset, (count,)).view(np.ndarray)
