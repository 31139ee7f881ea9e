"""Compressed files as streams of their content. The first bytes tell how a file is compressed."""

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


def _open_with_arrow(codec: str, file: IO[bytes]) -> Any:
    # Imported here, because it is slow and only these files need it.
    import pyarrow

    # Arrow's streams have no `readline`.
    stream: Any = pyarrow.CompressedInputStream(pyarrow.PythonFile(file, "r"), codec)
    return io.BufferedReader(stream)


COMPRESSIONS = (
    Compression("gzip", ".gz", rb"\x1f\x8b\x08", gzip.open),
    Compression("bzip2", ".bz2", rb"BZh[1-9](1AY&SY|\x17rE8P\x90)", bz2.open),
    Compression("xz", ".xz", rb"\xfd7zXZ\0", lzma.open),
    Compression("zstd", ".zst", rb"\x28\xb5\x2f\xfd", partial(_open_with_arrow, "zstd")),
    Compression("lz4", ".lz4", rb"\x04\x22\x4d\x18", partial(_open_with_arrow, "lz4")),
)


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


def reading(path: Path) -> Any:
    """Around each call that reads a file's content: damage is a ValueError that names the file."""
    return foreign_content(path, "damaged")
