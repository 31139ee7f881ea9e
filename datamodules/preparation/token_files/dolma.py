"""The .npy files of dolma and OLMo-core, which are raw tokens, and real ones of numpy.

The bounds of documents are in PART.csv.gz beside PART.npy, where that is: rows of start, end (in
tokens, exclusive), id, source and location, without a header.
"""

import csv
import gzip
import io
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from longhaul.datamodules.native import foreign_content
from longhaul.datamodules.preparation.token_files.ids import Vocabulary, raw_tokens
from longhaul.datamodules.preparation.token_files.sources import Items, StoredItems, Stream
from longhaul.datamodules.preparation.token_files.stored import Stored, check_size

NPY_MAGIC = b"\x93NUMPY"
_BLOCK = 1 << 16
# A row has two numbers and three names.
_MOST_ROW_CHARACTERS = 1 << 16
_MOST_DIGITS = 20


@dataclass(frozen=True)
class Bounded(StoredItems):
    """Tokens, and a table of where documents begin and end."""

    name: str
    files: tuple[Path, ...]
    stored: Stored
    documents: int = 0

    def ends(self) -> Iterator[NDArray[np.int64]]:
        table = self.files[1]
        at = number = 0
        with gzip.open(table, "rb") as raw, io.TextIOWrapper(raw, "utf-8", newline="") as text:
            rows = csv.reader(_lines(text))
            while True:
                with foreign_content(table, "damaged"):
                    # The rest of rows may be long, though few compressed bytes.
                    block = [
                        [one[:_MOST_DIGITS] for one in row[:2]] for row in islice(rows, _BLOCK)
                    ]
                if not block:
                    break
                ends = np.empty(len(block), np.int64)
                for place, row in enumerate(block):
                    number += 1
                    bounds = [
                        int(one) if one.isdecimal() and len(one) < _MOST_DIGITS else -1
                        for one in row
                    ]
                    if len(bounds) != 2 or bounds[0] != at or bounds[1] < at:
                        raise ValueError(
                            f"{table}:{number}: found {','.join(row)!a}, wanted start,end "
                            f"with start {at}, the end of the row before"
                        )
                    at = bounds[1]
                    ends[place] = at
                    if at > self.stored.tokens:
                        break
                if at > self.stored.tokens:
                    break
                yield ends
        if at != self.stored.tokens:
            raise ValueError(
                f"{self.files[0]}: found {self.stored.tokens:,} tokens, wanted {at:,}, the end in "
                f"row {number:,} of {table.name}"
            )


def _lines(text: io.TextIOWrapper) -> Iterator[str]:
    while line := text.readline(_MOST_ROW_CHARACTERS):
        yield line


def open_npy(name: str, path: Path, raw: str | None, vocabulary: Vocabulary) -> Items | Stream:
    """A .npy of either kind. ValueError where it is damaged, or its type is not known."""
    with path.open("rb") as file:
        is_real = file.read(len(NPY_MAGIC)) == NPY_MAGIC
    stored = npy_tokens(path) if is_real else raw_tokens(path, raw, vocabulary)
    table = path.with_name(path.name.removesuffix(".npy") + ".csv.gz")
    if not table.exists():
        return Stream(name, (stored,))
    bounded = Bounded(name, (path, table), stored)
    return replace(bounded, documents=sum(block.size for block in bounded.ends()))


def npy_tokens(path: Path) -> Stored:
    """The tokens of a real .npy, an array of one dimension."""
    with path.open("rb") as file, foreign_content(path, "not readable as .npy"):
        version = np.lib.format.read_magic(file)
        read = (
            np.lib.format.read_array_header_1_0
            if version == (1, 0)
            else np.lib.format.read_array_header_2_0
        )
        shape, _, dtype = read(file)
        offset = file.tell()
    if dtype.kind not in "iu" or len(shape) != 1:
        raise ValueError(
            f"{path}: found an array of {dtype} with {len(shape)} dimensions, wanted whole numbers "
            "in one dimension"
        )
    check_size(path, offset + shape[0] * dtype.itemsize)
    return Stored(path, dtype, shape[0], offset)
