"""Compressed files as streams of their content. The first bytes tell how a file is compressed.

A file may hold several streams, one behind the other, as parallel compressors and `cat` write them.
"""

import bz2
import gzip
import io
import lzma
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from longhaul.datamodules.files.untrusted import open_regular
from longhaul.datamodules.native import foreign_content


@dataclass(frozen=True)
class Compression:
    """A format that holds one compressed file."""

    name: str
    ending: str
    """Of names; what is before it tells what the content is."""
    magic: bytes
    """A regular expression for the first bytes."""
    open: Callable[[Any], Any]
    """The content of a compressed stream."""


# What a frame of zstd may refer back to, and what xz may allocate for that.
_MOST_WINDOW_BYTES = 128 << 20
_MOST_XZ_BYTES = _MOST_WINDOW_BYTES + (32 << 20)
_TOO_LARGE = ("requires too much memory", "Memory usage limit exceeded")
_SKIPPABLE = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")
_READ_BYTES = 1 << 16


class _Streams(io.RawIOBase):
    """The content of compressed streams, one behind the other, with zeros behind any of them.

    The modules bz2 and lzma take a damaged second stream for the end of the file.
    """

    def __init__(self, new: Callable[[], Any], file: IO[bytes]) -> None:
        self._new, self._file = new, file
        self._stream = new()
        self._is_begun = False
        self._input = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            if not self._input and (self._stream.eof or self._stream.needs_input):
                self._input = self._file.read(_READ_BYTES)
                if not self._input:
                    if self._is_begun and not self._stream.eof:
                        raise EOFError("found its end before that of the compressed data")
                    return 0
            if self._stream.eof:
                self._input = self._input.lstrip(b"\0")
                if not self._input:
                    continue
                self._stream = self._new()
            self._is_begun = True
            content = self._stream.decompress(self._input, len(buffer))
            self._input = self._stream.unused_data if self._stream.eof else b""
            if content:
                buffer[: len(content)] = content
                return len(content)


def _open_streams(new: Callable[[], Any], file: IO[bytes]) -> Any:
    return io.BufferedReader(_Streams(new, file))


def open_with_arrow(codec: str, file: IO[bytes]) -> Any:
    """The content of a stream in a codec of Arrow's."""
    # Imported here, because it is slow and only these files need it.
    import pyarrow

    # Arrow's streams have no `readline`.
    stream: Any = pyarrow.CompressedInputStream(pyarrow.PythonFile(file, "r"), codec)
    return io.BufferedReader(stream)


def _xz() -> Any:
    return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MOST_XZ_BYTES)


COMPRESSIONS = (
    Compression("gzip", ".gz", rb"\x1f\x8b\x08", gzip.open),
    Compression(
        "bzip2",
        ".bz2",
        rb"BZh[1-9](1AY&SY|\x17rE8P\x90)",
        partial(_open_streams, bz2.BZ2Decompressor),
    ),
    Compression("xz", ".xz", rb"\xfd7zXZ\0", partial(_open_streams, _xz)),
    Compression("zstd", ".zst", rb"\x28\xb5\x2f\xfd", partial(open_with_arrow, "zstd")),
    Compression("lz4", ".lz4", rb"\x04\x22\x4d\x18", partial(open_with_arrow, "lz4")),
)


def head_of(file: IO[bytes], size: int) -> bytes:
    """The first bytes of a file that tell what it holds: those behind what zstd and lz4 skip."""
    at = 0
    while _SKIPPABLE.match(start := file.read(8)) and len(start) == 8:
        at += len(start) + int.from_bytes(start[4:], "little")
        file.seek(at)
    file.seek(at)
    return file.read(size)


def compression_of(name: str, head: bytes) -> Compression | None:
    """How a file with this name and these first bytes is compressed, None if it is not.

    A name that promises a compression is believed: reading other bytes fails with the file's name.
    """
    for each in COMPRESSIONS:
        if re.match(each.magic, head) or name.lower().endswith(each.ending):
            return each
    return None


@contextmanager
def opened(path: Path, compression: Compression | None) -> Iterator[IO[bytes]]:
    """The content of a regular file, which is read by way of `reading` alone."""
    with open_regular(path) as file:
        if compression is None:
            yield file
            return
        with reading(path):
            stream = compression.open(file)
        with stream:
            yield stream


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Around each call that reads a file's content: damage is a ValueError that names the file."""
    try:
        with foreign_content(path, "damaged"):
            yield
    except ValueError as error:
        if not any(each in str(error) for each in _TOO_LARGE):
            raise
        raise ValueError(
            f"{path}: found a compression window above {_MOST_WINDOW_BYTES >> 20} MiB, wanted that "
            "at most; decompress the file first, with `zstd -d --long=31` or `xz -d`"
        ) from None
