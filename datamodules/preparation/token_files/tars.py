"""Webdataset tars with members `KEY.npy` or `KEY.tokens.npy`, which longhaul itself writes."""

import io
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import numpy as np

from longhaul.datamodules.files.untrusted import open_regular, shown
from longhaul.datamodules.native import foreign_content
from longhaul.datamodules.preparation.compression import compression_of, opened, reading
from longhaul.datamodules.preparation.token_files.mds import USUAL_COLUMNS
from longhaul.datamodules.preparation.token_files.sources import Items
from longhaul.datamodules.preparation.token_files.stored import Batch, gathered, unsigned
from longhaul.datamodules.shards import Tokens

_SUFFIXES = tuple(f"{name}.npy" for name in USUAL_COLUMNS)
_MOST_MEMBER_BYTES = 1 << 30
_MOST_NAMES = 1000
_HEAD_BYTES = 512
_END_BYTES = 2 * tarfile.BLOCKSIZE


@dataclass(frozen=True)
class Tar(Items):
    """One tar."""

    name: str
    files: tuple[Path, ...]
    suffix: str
    """What comes after the first dot in the names of members with tokens."""
    unit = "sample"

    def batches(self) -> Iterator[Batch]:
        return gathered(self._items())

    def _items(self) -> Iterator[Tokens]:
        path = self.files[0]
        for member, content in _members(path):
            if _suffix(member.name) != self.suffix:
                continue
            where = f"{path}: {shown(member.name)}"
            if member.size > _MOST_MEMBER_BYTES:
                raise ValueError(f"{where}: found {member.size:,} bytes, wanted 1 GiB at most")
            with reading(path):
                array_bytes = content.read()
            with foreign_content(where, "not readable as .npy"):
                array = np.load(io.BytesIO(array_bytes), allow_pickle=False)
            if array.dtype.kind not in "iu" or array.ndim != 1:
                raise ValueError(
                    f"{where}: found an array of {array.dtype} with {array.ndim} dimensions, "
                    "wanted whole numbers in one dimension"
                )
            yield unsigned(array)


def open_tar(name: str, path: Path, column: str | None) -> Tar:
    """The samples of a tar.

    Args:
        column: what comes after the first dot in the names of members with tokens. None: a usual
            name, or the only .npy.

    Raises:
        ValueError: it is damaged, or has no such member.
    """
    found: list[str] = []
    for number, (member, _) in enumerate(_members(path)):
        if number == _MOST_NAMES:
            break
        if (suffix := _suffix(member.name)) and suffix not in found:
            found.append(suffix)
    if column is None:
        arrays = [one for one in found if one.endswith("npy") and not one.endswith("ends.npy")]
        usual = [one for one in _SUFFIXES if one in arrays]
        if not usual and len(arrays) != 1:
            raise ValueError(
                f"{path}: found members {shown(found)}, wanted to know which of them are .npy "
                "arrays of tokens (--column)"
            )
        column = (usual or arrays)[0]
    elif column not in found:
        raise ValueError(f"{path}: found members {shown(found)}, wanted {shown(column)}")
    if not column.endswith("npy"):
        raise ValueError(f"{path}: found members .{column}, wanted .npy arrays")
    return Tar(name, (path,), column)


def _suffix(name: str) -> str:
    """What webdataset takes for the name of a member within its sample."""
    return name.rpartition("/")[2].partition(".")[2].lower()


def _members(path: Path) -> Iterator[tuple[tarfile.TarInfo, IO[bytes]]]:
    """The plain files of a tar, which may be compressed, and their content."""
    with open_regular(path) as file:
        head = file.read(_HEAD_BYTES)
    with opened(path, compression_of(path.name, head)) as stream:
        whole = _Whole(stream)
        with reading(path):
            tar = tarfile.TarFile.open(
                fileobj=cast(IO[bytes], whole), mode="r|", errors="surrogateescape"
            )
        with tar:
            while True:
                with reading(path):
                    member = tar.next()
                    content = tar.extractfile(member) if member and member.isreg() else None
                if member is None:
                    break
                tar.members = []  # type: ignore[attr-defined]  # else it keeps all of them
                if content is not None:
                    yield member, content
        with reading(path):
            has_end = whole.ends_in_zeros()
    # tarfile takes a file that is cut between two members, or in a header, for a shorter one.
    if not has_end:
        raise ValueError(
            f"{path}: found no end of the tar, wanted {_END_BYTES} bytes of zeros: a cut copy"
        )


class _Whole:
    """A stream that remembers its last bytes."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._last = b""

    def read(self, size: int) -> bytes:
        block = self._stream.read(size)
        self._last = (self._last + block)[-_END_BYTES:]
        return block

    def ends_in_zeros(self) -> bool:
        """Whether the stream, read up to its end, ends as a tar does."""
        while self.read(1 << 20):
            pass
        return self._last == b"\0" * _END_BYTES
