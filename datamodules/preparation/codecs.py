"""Decompresses a chunk of a Zarr store into no more memory than the chunk should take."""

import zlib
from typing import Literal, TypeAlias

from longhaul.datamodules.untrusted import one_line

Codec: TypeAlias = Literal["blosc", "gzip", "lz4", "zlib", "zstd"]

# Versions and flags (4 bytes), then the decoded size, the block size and the stored size.
_BLOSC_HEADER_BYTES = 16
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


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
        _check_header(codec, content, size)
        found = _decoded_by_numcodecs(codec, content)
    if len(found) != size:
        more = "more than " if len(found) > size else ""
        raise ValueError(f"found {more}{min(len(found), size)} bytes when decoded, wanted {size}")
    return found


def _check_header(codec: str, content: bytes, size: int) -> None:
    """Raise unless the header announces `size` bytes: numcodecs allocates what it announces."""
    if codec == "blosc":
        stored = int.from_bytes(content[12:16], "little")
        # blosc would decode memory after the end of a file that is cut short.
        if len(content) < _BLOSC_HEADER_BYTES or len(content) != stored:
            raise ValueError(f"{len(content)} bytes, wanted {stored}")
        announced = int.from_bytes(content[4:8], "little")
    elif codec == "lz4":
        announced = int.from_bytes(content[:4], "little")
    else:
        announced = _announced_by_zstd(content)
    if announced != size:
        raise ValueError(f"{announced} bytes when decoded, wanted {size}")


def _announced_by_zstd(content: bytes) -> int:
    """The size in the header of a frame, RFC 8878, section 3.1.1.1; 0 if it names none."""
    if content[:4] != _ZSTD_MAGIC or len(content) < 5:
        raise ValueError("found no frame of zstd")
    descriptor = content[4]
    is_single_segment = bool(descriptor & 0x20)
    start = 5 + (not is_single_segment) + (0, 1, 2, 4)[descriptor & 3]
    flag = descriptor >> 6
    width = (int(is_single_segment), 2, 4, 8)[flag]
    number = int.from_bytes(content[start : start + width], "little")
    return number + 256 if flag == 1 else number


def _decoded_by_numcodecs(codec: str, content: bytes) -> bytes:
    # Imported here, because it is slow and a bad store should be refused at once.
    import numcodecs

    try:
        return bytes(numcodecs.get_codec({"id": codec}).decode(content))
    except (RuntimeError, ValueError) as error:
        raise ValueError(one_line(error)) from None
