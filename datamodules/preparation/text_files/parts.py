"""Parts of a file of records, each of which can be read without the others."""

from collections.abc import Iterable
from typing import NamedTuple


class FilePart(NamedTuple):
    """Bytes of JSON lines, row groups of a Parquet file, or record batches of an Arrow file."""

    start: int = 0
    stop: int | None = None
    """None: the end of the file."""
    before: int = 0
    """The number of lines or rows before it."""


WHOLE_FILE = FilePart()


def parts_from(starts: list[tuple[int, int]]) -> list[FilePart]:
    """The parts that begin with these bytes, groups or batches, and so many records before each."""
    stops = [*(start for start, _ in starts[1:]), None]
    return [FilePart(at, stop, before) for (at, before), stop in zip(starts, stops, strict=True)]


def parts_of_groups(groups: Iterable[tuple[int, int]], size: int) -> list[FilePart]:
    """Parts of whole groups of records, of which bytes and records are given.

    A part ends with the group that fills it.
    """
    starts = [(0, 0)]
    filled = records = 0
    for number, (group_bytes, group_records) in enumerate(groups):
        if filled >= size:
            starts.append((number, records))
            filled = 0
        filled += group_bytes
        records += group_records
    return parts_from(starts)
