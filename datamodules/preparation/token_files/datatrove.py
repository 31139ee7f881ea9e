"""datatrove's NAME.ds, tokens back to back, with NAME.ds.index, the ends of documents (`<Q`)."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from longhaul.datamodules.preparation.token_files.sources import StoredItems
from longhaul.datamodules.preparation.token_files.stored import Stored, check_size

_log = logging.getLogger(__name__)
_BLOCK = 1 << 16
_MOST_METADATA_BYTES = 1 << 16


@dataclass(frozen=True)
class Datatrove(StoredItems):
    name: str
    files: tuple[Path, ...]
    stored: Stored
    documents: int

    def ends(self) -> Iterator[NDArray[np.int64]]:
        return _blocks(self.files[1], self.documents)


def _blocks(path: Path, documents: int) -> Iterator[NDArray[np.int64]]:
    index = Stored(path, np.dtype("<u8"), documents)
    for at in range(0, documents, _BLOCK):
        yield index.read(at, min(_BLOCK, documents - at)).view(np.int64)


def open_datatrove(name: str, path: Path) -> Datatrove:
    """The documents of a .ds. ValueError where it or its index is damaged."""
    index = path.with_name(f"{path.name}.index")
    if not index.is_file():
        raise ValueError(f"{path}: found no {index.name} beside it, wanted one, the ends of texts")
    index_size = index.stat().st_size
    if index_size % 8 or not index_size:
        raise ValueError(
            f"{index}: found {index_size:,} bytes, wanted a multiple of 8 and one document: a cut "
            "copy"
        )
    before = np.int64(0)
    for number, ends in enumerate(_blocks(index, index_size // 8)):
        if (np.diff(ends, prepend=before) < 0).any():
            at = int(np.argmax(np.diff(ends, prepend=before) < 0))
            raise ValueError(
                f"{index}: found ends that fall at document {number * _BLOCK + at + 1:,}, wanted "
                "them to grow"
            )
        before = ends[-1]
    tokens = int(before)
    itemsize = _item_size(path)
    if itemsize is None:
        itemsize = 4 if path.stat().st_size == 4 * tokens else 2
    check_size(path, tokens * itemsize, f"its index counts {tokens:,} tokens of {itemsize} bytes")
    if path.with_name(f"{path.name}.loss").exists():
        _log.warning("%s.loss: the mask of losses is not used: every token is trained on", path)
    stored = Stored(path, np.dtype(f"<u{itemsize}"), tokens)
    return Datatrove(name, (path, index), stored, index_size // 8)


def _item_size(path: Path) -> int | None:
    """Bytes of a token as the metadata say, None where there are none."""
    metadata = path.with_name(f"{path.name}.metadata")
    if not metadata.is_file():
        return None
    with metadata.open("rb") as file:
        first = file.read(_MOST_METADATA_BYTES).partition(b"\n")[0]
    last = first.rpartition(b"|")[2]
    if last not in (b"2", b"4"):
        raise ValueError(
            f"{metadata}: found {first[-60:]!r}, wanted a line that ends in |2 or |4, the bytes of "
            "a token"
        )
    return int(last)
