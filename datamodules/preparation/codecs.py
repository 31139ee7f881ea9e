"""Decompresses a chunk of a Zarr store into no more memory than the chunk should take."""

import zlib
from collections.abc import Callable
from typing import Literal, TypeAlias

import numpy as np

from longhaul.datamodules.files.untrusted import one_line
from longhaul.datamodules.native import foreign_content

Codec: TypeAlias = Literal["blosc", "gzip", "lz4", "zlib", "zstd"]

# Versions and flags (4 bytes), then the decoded size, the block size and the stored size.
_BLOSC_HEADER_BYTES = 16
# Where the decoded size stands. numcodecs writes it in front of what lz4 compressed.
_ANNOUNCED = {"blosc": slice(4, 8), "lz4": slice(0, 4)}


def decoded(codec: Codec | None, content: bytes, size: int) -> bytes:
    """The `size` bytes that `content` stands for; None means that it is not compressed.

    Raises:
        ValueError: it stands for fewer bytes, for more, or is damaged.
    """
    if codec is None:
        found: bytes = content
    elif codec in ("gzip", "zlib"):
        # 32: with the header of either.
        inflating = zlib.decompressobj(32 + zlib.MAX_WBITS)
        try:
            found = inflating.decompress(content, size + 1)
        except zlib.error as error:
            raise ValueError(one_line(error)) from None
        if not inflating.eof and len(found) == size:
            raise ValueError("found its end before that of the compressed data")
    else:
        if codec == "blosc":
            _check_length(content)
        found = _decoded_by_numcodecs(codec, content, size)
    if len(found) != size:
        more = "more than " if len(found) > size else ""
        raise ValueError(f"found {more}{min(len(found), size)} bytes when decoded, wanted {size}")
    return found


def _check_length(content: bytes) -> None:
    """Raise at a file that is cut short: blosc would decode memory after its end."""
    if len(content) < _BLOSC_HEADER_BYTES:
        raise ValueError(f"found {len(content)} bytes, wanted {_BLOSC_HEADER_BYTES} or more")
    stored = int.from_bytes(content[12:_BLOSC_HEADER_BYTES], "little")
    if len(content) != stored:
        raise ValueError(f"found {len(content)} bytes, wanted {stored}")


def _decoded_by_numcodecs(codec: str, content: bytes, size: int) -> bytes:
    # Imported here, because it is slow and a bad store should be refused at once.
    import numcodecs

    decode = numcodecs.get_codec({"id": codec}).decode
    # Without `out`, numcodecs allocates whatever the header announces.
    out = np.empty(size, np.uint8)
    with foreign_content(codec, "cannot be decoded"):
        decode(content, out=out)
    # Fewer bytes fill the beginning of `out` without a word.
    if _holds_fewer(codec, decode, content, size):
        raise ValueError(f"found fewer than {size} bytes when decoded, wanted {size}")
    return out.tobytes()


def _holds_fewer(codec: str, decode: Callable[..., object], content: bytes, size: int) -> bool:
    """Whether a chunk that fits into `size` bytes when decoded would not fill them."""
    if codec in _ANNOUNCED:
        return int.from_bytes(content[_ANNOUNCED[codec]], "little") < size
    # A zstd frame may not say its size, but fewer bytes would fit into a shorter buffer too.
    try:
        with foreign_content(codec, "cannot be decoded"):
            decode(content, out=np.empty(size - 1, np.uint8))
    except ValueError:
        return False
    return True
