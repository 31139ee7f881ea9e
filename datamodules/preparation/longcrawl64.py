"""Prepare LongCrawl64: a Zarr v2 array of ids with one document per row, read by rows of chunks."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from longhaul.datamodules.files.untrusted import parse_json, read_regular, shown
from longhaul.datamodules.manifest import Manifest
from longhaul.datamodules.preparation.codecs import Codec, decoded
from longhaul.datamodules.preparation.resumable import Cursor, Progress, prepare_shards
from longhaul.datamodules.shards import Block
from longhaul.datamodules.tokenizer import LongCrawl64Tokenizer
from longhaul.datamodules.urls import MissingInputError

WHOLE = "whole"
LARGEST_ID = 50_256
# One row of chunks is in memory at a time, 256 MiB in LongCrawl64. Larger ones would break the
# limit of 1 GiB for the whole process.
_MAX_ROW_OF_CHUNKS_BYTES = 512 << 20
_RANGES_NAMED = 20
# LongCrawl64 has some hundred thousand. The names of all of them are in memory.
_MOST_CHUNKS = 1 << 20
_MOST_METADATA_BYTES = 1 << 20
_TOKEN_BYTES = 2

_Sizes = Annotated[list[Annotated[int, Field(ge=1, le=1 << 40)]], Field(min_length=2, max_length=2)]
RowRange = tuple[int, int]


@dataclass(frozen=True)
class _Compressor:
    id: Codec


@dataclass(frozen=True)
class _ArrayMetadata:
    """The file `.zarray` of Zarr v2, of an array of two dimensions whose chunks can be read."""

    zarr_format: Literal[2]
    shape: _Sizes
    chunks: _Sizes
    dtype: Literal["<u2"]
    compressor: _Compressor | None
    order: Literal["C"]
    filters: Annotated[list[object], Field(max_length=0)] | None
    fill_value: Annotated[int, Field(ge=0, le=0xFFFF)] | None
    dimension_separator: Literal[".", "/"] = "."


@dataclass(frozen=True)
class ZarrStore:
    """A local Zarr v2 store of one two-dimensional array of uint16."""

    path: Path
    rows: int
    columns: int
    chunk_rows: int
    chunk_columns: int
    separator: str
    """The character between the two numbers in the name of a chunk file."""
    codec: Codec | None
    """How chunks are compressed; None means not at all."""

    @cached_property
    def missing(self) -> list[str]:
        """Chunks whose file is missing or empty, in order. Zarr would read them as zeros."""
        present = self._chunk_files()
        return [
            name
            for row in range(-(-self.rows // self.chunk_rows))
            for name in self.chunks_of(row)
            if name not in present
        ]

    def whole_ranges(self) -> list[RowRange]:
        """The longest ranges of rows in which all chunks have a file."""
        holes = {int(name.split(self.separator)[0]) for name in self.missing}
        ranges: list[RowRange] = []
        for row in range(-(-self.rows // self.chunk_rows)):
            if row in holes:
                continue
            start = row * self.chunk_rows
            end = min(start + self.chunk_rows, self.rows)
            if ranges and ranges[-1][1] == start:
                start = ranges.pop()[0]
            ranges.append((start, end))
        return ranges

    def require_whole(self, ranges: list[RowRange]) -> None:
        """Raise unless every chunk of these rows has a file. The message names complete rows."""
        taken = {
            row
            for start, end in ranges
            for row in range(start // self.chunk_rows, -(-end // self.chunk_rows))
        }
        missing = [n for n in self.missing if int(n.split(self.separator)[0]) in taken]
        if not missing:
            return
        total = len(taken) * len(self.chunks_of(0))
        whole = self.whole_ranges()
        named = ",".join(f"{start}:{end}" for start, end in whole[:_RANGES_NAMED])
        rest = len(whole) - _RANGES_NAMED
        more = f" and {rest} more ranges" if rest > 0 else ""
        raise ValueError(
            f"{self.path}: {len(missing)} of {total} chunk files are missing, the first is "
            f"{missing[0]}; whole rows: {named or 'none'}{more} "
            f"(--rows takes such ranges, or `{WHOLE}` for all of them)"
        )

    def read_chunk(self, name: str) -> NDArray[np.uint16]:
        """The ids of a chunk, of shape (chunk_rows, chunk_columns).

        Raises:
            ValueError: the file is no such chunk, whatever its bytes are.
            OSError: it cannot be read.
        """
        size = self.chunk_rows * self.chunk_columns * _TOKEN_BYTES
        # What does not compress grows a little.
        content = decoded(self.codec, read_regular(self.path / name, 2 * size + 1024), size)
        return np.frombuffer(content, "<u2").reshape(self.chunk_rows, self.chunk_columns)

    def chunks_of(self, row: int) -> list[str]:
        """Names of the chunks in a row of chunks."""
        columns = range(-(-self.columns // self.chunk_columns))
        return [f"{row}{self.separator}{column}" for column in columns]

    def _chunk_files(self) -> set[str]:
        if self.separator == ".":
            return {item.name for item in os.scandir(self.path) if _has_content(item)}
        return {
            f"{folder.name}/{item.name}"
            for folder in os.scandir(self.path)
            if folder.is_dir()
            for item in os.scandir(folder)
            if _has_content(item)
        }


def _has_content(item: os.DirEntry[str]) -> bool:
    try:
        return item.stat().st_size > 0
    except FileNotFoundError:  # a link to nothing
        return False


def open_store(path: Path) -> ZarrStore:
    """Check that a folder is a store with the layout of LongCrawl64, and read its sizes."""
    if not path.is_dir():
        raise MissingInputError(f"{path}: no such folder, wanted a Zarr v2 store")
    if not (path / ".zarray").is_file():
        found = "a Zarr group" if (path / ".zgroup").is_file() else "no .zarray"
        raise ValueError(f"{path}: found {found}, wanted a Zarr v2 store of one top-level array")
    file = path / ".zarray"
    meta = parse_json(_ArrayMetadata, read_regular(file, _MOST_METADATA_BYTES), file)
    (rows, columns), (chunk_rows, chunk_columns) = meta.shape, meta.chunks
    if chunk_rows * max(columns, chunk_columns) * _TOKEN_BYTES > _MAX_ROW_OF_CHUNKS_BYTES:
        limit = _MAX_ROW_OF_CHUNKS_BYTES >> 20
        raise ValueError(
            f"{path}: chunks are {shown(tuple(meta.chunks))}, wanted rows of chunks of at most "
            f"{limit} MiB"
        )
    chunks = -(-rows // chunk_rows) * -(-columns // chunk_columns)
    if chunks > _MOST_CHUNKS:
        raise ValueError(
            f"{path}: shape {shown(tuple(meta.shape))} and chunks {shown(tuple(meta.chunks))} make "
            f"{chunks:,} chunks, wanted {_MOST_CHUNKS:,} at most"
        )
    return ZarrStore(
        path=path,
        rows=rows,
        columns=columns,
        chunk_rows=chunk_rows,
        chunk_columns=chunk_columns,
        separator=meta.dimension_separator,
        codec=meta.compressor.id if meta.compressor else None,
    )


def parse_rows(store: ZarrStore, rows: str | None) -> list[RowRange]:
    """Ranges of rows from `A:B`, `A:B,C:D` or `whole`. None is all rows."""
    if rows is None:
        return [(0, store.rows)]
    if rows == WHOLE:
        return store.whole_ranges()
    ranges: list[RowRange] = []
    for part in rows.split(","):
        match = re.fullmatch(r"(\d*):(\d*)", part.strip())
        start = int(match[1] or 0) if match else -1
        end = int(match[2] or store.rows) if match else -1
        if not 0 <= start < end <= store.rows:
            raise ValueError(
                f"rows: found {part!r}, wanted A:B with 0 <= A < B <= {store.rows}, several with "
                f"commas between, or `{WHOLE}`"
            )
        ranges.append((start, end))
    for (_, end), (start, _) in zip(sorted(ranges), sorted(ranges)[1:], strict=False):
        if start < end:
            raise ValueError(f"rows: found {rows!r}, wanted ranges that do not overlap")
    return ranges


def prepare_longcrawl64(
    store: ZarrStore,
    destination: Path,
    ranges: list[RowRange],
    *,
    docs_per_shard: int = 256,
    progress: Progress = lambda tokens: None,
) -> Manifest:
    """Write shards of these rows, in this order. One row of chunks is in memory at a time.

    Raises:
        ValueError: if chunks are missing or damaged, an id is too large, or the destination holds
            other files.
    """
    if not ranges:
        raise ValueError(f"{store.path}: no row of chunks is whole")
    store.require_whole(ranges)
    tokenizer = LongCrawl64Tokenizer()
    template = Manifest(
        **tokenizer.identity,
        document_tokens=store.columns,
        dtype="uint16",
        source={
            "kind": "longcrawl64",
            # As UTF-8, in which not every name can be written, the manifest is read again.
            "store": os.fsencode(store.path.resolve().name).decode(errors="replace"),
            "shape": [store.rows, store.columns],
            "rows": [list(pair) for pair in ranges],
            "docs_per_shard": docs_per_shard,
        },
        shards=(),
    )
    return prepare_shards(
        destination,
        template,
        _Rows(store, ranges),
        docs_per_shard=docs_per_shard,
        prefix="train",
        progress=progress,
    )


class _Rows:
    """The rows of a store as blocks. A cursor is [number of blocks before]."""

    version = 1

    def __init__(self, store: ZarrStore, ranges: list[RowRange]) -> None:
        self._store = store
        self._ranges = ranges

    def blocks(self, cursor: Cursor | None) -> Iterator[tuple[Block, Cursor]]:
        store = self._store
        buffer = np.empty((store.chunk_rows, store.columns), np.uint16)
        done = cursor[0] if cursor else 0
        passed = 0
        for start, end in self._ranges:
            row = start + max(0, done - passed)
            passed += end - start
            while row < end:
                chunk_row = row // store.chunk_rows
                last = min(end, (chunk_row + 1) * store.chunk_rows)
                rows = slice(
                    row - chunk_row * store.chunk_rows, last - chunk_row * store.chunk_rows
                )
                self._read_row_of_chunks(chunk_row, buffer)
                self._check_ids(buffer[rows], row)
                for block in buffer[rows]:
                    done += 1
                    yield Block(block), [done]
                row = last

    def _read_row_of_chunks(self, chunk_row: int, buffer: NDArray[np.uint16]) -> None:
        store = self._store
        for number, name in enumerate(store.chunks_of(chunk_row)):
            left = number * store.chunk_columns
            right = min(left + store.chunk_columns, store.columns)
            try:
                # The file of a chunk at an edge of the array has ids beyond the edge too.
                buffer[:, left:right] = store.read_chunk(name)[:, : right - left]
            except (ValueError, OSError) as error:
                raise ValueError(f"{store.path}: chunk {name} is damaged, {error}") from None

    def _check_ids(self, rows: NDArray[np.uint16], first_row: int) -> None:
        if rows.max() <= LARGEST_ID:
            return
        row, column = (int(place[0]) for place in np.nonzero(rows > LARGEST_ID))
        raise ValueError(
            f"{self._store.path}: id {rows[row, column]} at row {first_row + row}, column "
            f"{column}, wanted ids up to {LARGEST_ID}"
        )
