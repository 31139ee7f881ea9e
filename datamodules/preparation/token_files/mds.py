"""mosaicml-streaming's MDS: index.json, and shards of samples that are rows of columns.

A sample is the sizes (`<u4`) of the columns whose size varies, then the bytes of all columns, in
the order of their names. Columns of pickles are not read.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from longhaul.datamodules.files.untrusted import (
    Count,
    InnerPath,
    inner_path,
    parse_json,
    read_regular,
    shown,
)
from longhaul.datamodules.preparation.token_files.packed import Packed
from longhaul.datamodules.preparation.token_files.sources import Items
from longhaul.datamodules.preparation.token_files.stored import (
    RAW_TYPES,
    Batch,
    check_size,
    gathered,
    unsigned,
)
from longhaul.datamodules.shards import Tokens

USUAL_COLUMNS = ("tokens", "input_ids", "token_ids", "ids")
_MOST_INDEX_BYTES = 256 << 20
_CODES = {8: "u1", 9: "i1", 16: "u2", 17: "i2", 32: "u4", 33: "i4", 64: "u8", 65: "i8"}
_NAMES = {np.dtype(code).name: np.dtype(code) for code in _CODES.values()}


@dataclass(frozen=True)
class _Data:
    basename: InnerPath
    bytes: Count


@dataclass(frozen=True)
class _Shard:
    column_encodings: list[str]
    column_names: list[str]
    column_sizes: list[Count | None]
    compression: str | None
    format: Literal["mds"]
    raw_data: _Data
    samples: Count
    zip_data: _Data | None


@dataclass(frozen=True)
class _Index:
    shards: Annotated[list[_Shard], Field(min_length=1)]
    version: Literal[2] = 2


@dataclass(frozen=True)
class Mds(Items):
    """One shard of MDS."""

    name: str
    files: tuple[Path, ...]
    packed: Packed
    sizes: tuple[int | None, ...]
    """Of each column; None where it varies."""
    column: int
    decoder: "Column"
    samples: int
    unit = "sample"

    def batches(self) -> Iterator[Batch]:
        return gathered(self._items())

    def _items(self) -> Iterator[Tokens]:
        varying = [number for number, size in enumerate(self.sizes) if size is None]
        head = 4 * len(varying)
        number = 0
        for number, sample in enumerate(self.packed.items(), start=1):
            sizes = list(self.sizes)
            if len(sample) < head:
                self._refuse(number, f"{len(sample)} bytes")
            for place, size in zip(varying, np.frombuffer(sample[:head], "<u4"), strict=True):
                sizes[place] = int(size)
            known = [size for size in sizes if size is not None]
            start = head + sum(known[: self.column])
            if head + sum(known) != len(sample):
                self._refuse(number, f"{len(sample)} bytes, wanted {head + sum(known)}")
            try:
                yield self.decoder.decode(sample[start : start + known[self.column]])
            except ValueError as error:
                self._refuse(number, str(error))
        if number != self.samples:
            raise ValueError(
                f"{self.files[0]}: found {number:,} samples, wanted {self.samples:,} (index.json)"
            )

    def _refuse(self, number: int, found: str) -> None:
        raise ValueError(f"{self.files[0]}: sample {number:,}: found {found}")


@dataclass(frozen=True)
class Column:
    """How a column holds tokens: `ndarray`, with its type and shape where they do not vary."""

    dtype: np.dtype | None
    has_shape: bool

    def decode(self, content: memoryview) -> Tokens:
        """The tokens of one sample; ValueError, without its place, where it is damaged."""
        dtype, at = self.dtype, 0
        if dtype is None:
            if not content or content[0] not in _CODES:
                raise ValueError("no type of whole numbers")
            dtype, at = np.dtype(_CODES[content[0]]), 1
        count = (len(content) - at) // dtype.itemsize
        if not self.has_shape:
            head = content[at] if len(content) > at else 0
            dimensions, width = head >> 2, 1 << (head & 3)
            if dimensions != 1:
                raise ValueError(f"an array of {dimensions} dimensions, wanted one")
            count = int.from_bytes(content[at + 1 : at + 1 + width], "little")
            at += 1 + width
        if len(content) - at != count * dtype.itemsize:
            raise ValueError(
                f"{len(content) - at} bytes of tokens, wanted {count} of {dtype.itemsize} bytes"
            )
        return unsigned(np.frombuffer(content[at:], dtype))


def open_mds(name: str, folder: Path, column: str | None, raw: str | None) -> list[Items]:
    """The shards of a folder.

    Args:
        column: the one that holds tokens. None: one with a usual name, or the only array.
        raw: the type of tokens in a column of `bytes`.

    Raises:
        ValueError: a shard is damaged or missing, or has no such column.
    """
    where = folder / "index.json"
    index = parse_json(_Index, read_regular(where, _MOST_INDEX_BYTES), where)
    found: list[Items] = []
    for shard in index.shards:
        if not len(shard.column_names) == len(shard.column_encodings) == len(shard.column_sizes):
            raise ValueError(
                f"{where}: found columns without encoding or size, wanted one for each"
            )
        encodings = dict(zip(shard.column_names, shard.column_encodings, strict=True))
        chosen = _choose(encodings, column, where)
        decoder = _column_of(chosen, encodings[chosen], raw, where)
        packed = _packed(folder, shard, where)
        packed.check()
        found.append(
            Mds(
                f"{name}/{shard.raw_data.basename}" if name else shard.raw_data.basename,
                (packed.path,),
                packed,
                tuple(shard.column_sizes),
                shard.column_names.index(chosen),
                decoder,
                shard.samples,
            )
        )
    return found


def _packed(folder: Path, shard: _Shard, where: Path) -> Packed:
    """The file of a shard: the compressed one, or one that is decompressed already."""
    raw = shard.raw_data
    if shard.compression is None or (folder / raw.basename).exists():
        return Packed(inner_path(folder, raw.basename), None, raw.bytes)
    if shard.zip_data is None:
        raise ValueError(f"{where}: found a compressed shard without zip_data, wanted its name")
    path = inner_path(folder, shard.zip_data.basename)
    check_size(path, shard.zip_data.bytes, "index.json")
    return Packed(path, shard.compression.partition(":")[0], raw.bytes)


def _choose(encodings: Mapping[str, str], column: str | None, where: Path) -> str:
    if column is not None:
        if column in encodings:
            return column
        raise ValueError(f"{where}: found columns {shown(list(encodings))}, wanted {shown(column)}")
    usual = [name for name in USUAL_COLUMNS if name in encodings]
    arrays = [name for name, kind in encodings.items() if kind.partition(":")[0] == "ndarray"]
    if usual or len(arrays) == 1:
        return (usual or arrays)[0]
    raise ValueError(
        f"{where}: found columns {shown(list(encodings))}, wanted to know which one holds tokens "
        "(--column)"
    )


def _column_of(name: str, encoding: str, raw: str | None, where: Path) -> Column:
    place = f"{where}: column {shown(name)}"
    kind, *details = encoding.split(":")
    if kind == "bytes":
        if raw is None:
            raise ValueError(
                f"{place}: found bytes, wanted --raw, the type of tokens in them, such as int64"
            )
        return Column(RAW_TYPES[raw], has_shape=True)
    if kind == "pkl":
        raise ValueError(
            f"{place}: found pickles, which run code when they are read, wanted arrays"
        )
    if kind != "ndarray":
        raise ValueError(f"{place}: found {shown(encoding)}, wanted ndarray of whole numbers")
    if details and details[0] not in _NAMES:
        raise ValueError(f"{place}: found {shown(encoding)}, wanted whole numbers")
    return Column(_NAMES[details[0]] if details else None, has_shape=len(details) > 1)
