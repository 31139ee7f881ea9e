"""Webdataset tars with members `KEY.npy` or `KEY.tokens.npy`, which longhaul itself writes."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO

import numpy as np

from longhaul.datamodules.files.untrusted import open_regular, shown
from longhaul.datamodules.native import foreign_content
from longhaul.datamodules.preparation.archives import files_in
from longhaul.datamodules.preparation.compression import compression_of, opened
from longhaul.datamodules.preparation.token_files.mds import USUAL_COLUMNS
from longhaul.datamodules.preparation.token_files.sources import Items
from longhaul.datamodules.preparation.token_files.stored import Batch, gathered, unsigned
from longhaul.datamodules.shards import Tokens

_SUFFIXES = tuple(f"{name}.npy" for name in USUAL_COLUMNS)
_MOST_MEMBER_BYTES = 1 << 30
_MOST_NAMES = 1000
_HEAD_BYTES = 512


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
        with _opened(path) as file:
            for name, read in files_in(file, path):
                if _suffix(name) != self.suffix:
                    continue
                where = f"{path}: {shown(name)}"
                content = read(_MOST_MEMBER_BYTES)
                with foreign_content(where, "not readable as .npy"):
                    array = np.load(io.BytesIO(content), allow_pickle=False)
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
    with _opened(path) as file:
        names = [_suffix(name) for name, _ in islice(files_in(file, path), _MOST_NAMES)]
    found = list(dict.fromkeys(filter(None, names)))
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


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """The content of a tar, which may be compressed."""
    with open_regular(path) as file:
        head = file.read(_HEAD_BYTES)
    with opened(path, compression_of(path.name, head)) as stream:
        yield stream
