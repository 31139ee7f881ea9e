"""The files in tars that anyone may have written: damage is never taken for the end of the archive.

Folders, links and devices are skipped.
"""

import tarfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO

from longhaul.datamodules.files.untrusted import shown
from longhaul.datamodules.preparation.compression import reading

# Headers that hold a name or a comment for the next file, which tarfile reads whole.
_EXTENDED = (
    *(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE),
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
)
_MOST_HEADER_BYTES = 1 << 20


class _Header(tarfile.TarInfo):
    """A header that raises where tarfile would take damage for the end of the archive."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "_Header":
        if not buf:
            raise tarfile.ReadError("found no end of the tar, wanted one: a cut copy")
        try:
            header = super().frombuf(buf, encoding, errors)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"{error}, wanted a header or the end marker") from None
        if header.type in _EXTENDED and header.size > _MOST_HEADER_BYTES:
            raise tarfile.ReadError(f"found an extended header of {header.size:,} bytes")
        return header


def files_in(file: IO[bytes], path: Path) -> Iterator[tuple[str, Callable[[int], bytes]]]:
    """The name of each file in a tar, and what reads it before the next one is asked for.

    Args:
        file: the tar, decompressed.
        path: its own, for messages.

    Raises ValueError at damage, and where a file has more than the bytes that it is read with.
    """
    with reading(path):
        archive = tarfile.open(  # noqa: SIM115  the file is closed by whoever opened it
            fileobj=file, mode="r|", tarinfo=_Header, encoding="utf-8", errors="surrogateescape"
        )
    while (member := _next_member(archive, path)) is not None:
        if member.isreg():
            yield member.name, partial(_content, archive, member, path)


def _next_member(archive: tarfile.TarFile, path: Path) -> tarfile.TarInfo | None:
    with reading(path):
        member = archive.next()
        # Else it would keep every header.
        archive.members.clear()  # type: ignore[attr-defined]
        if member is None and not _is_over(archive):
            raise tarfile.ReadError("found more after its end, wanted one archive")
    return member


def _is_over(archive: tarfile.TarFile) -> bool:
    """Whether only zeros follow."""
    stream = archive.fileobj
    while stream is not None and (block := stream.read(1 << 16)):
        if block.strip(b"\0"):
            return False
    return True


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path, most: int) -> bytes:
    if member.size > most:
        raise ValueError(
            f"{path}: found {shown(member.name)} of {member.size:,} bytes, wanted "
            f"{most >> 20} MiB at most"
        )
    with reading(path):
        file = archive.extractfile(member)
        return b"" if file is None else file.read()
