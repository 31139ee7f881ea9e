"""Tokens that stand back to back in files, read in windows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longhaul.datamodules.files.untrusted import open_regular
from longhaul.datamodules.shards import Tokens

WINDOW_TOKENS = 1 << 20
"""So many tokens are in memory at a time, or one document of a format that knows its bounds."""

RAW_TYPES = {
    **{name: np.dtype(name) for name in ("uint8", "uint16", "uint32", "uint64", "int32", "int64")},
    **{f"{name}be": np.dtype(name).newbyteorder(">") for name in ("uint16", "uint32", "int32")},
}
"""How tokens may be stored where the file itself does not say, by the name that `--raw` has."""


def check_size(path: Path, wanted: int, why: str = "") -> None:
    """Raise ValueError unless a file has so many bytes; `why` ends the message, in brackets."""
    if (found := path.stat().st_size) != wanted:
        reason = f" ({why})" if why else ""
        short = ": a cut copy" if found < wanted else ""
        raise ValueError(f"{path}: found {found:,} bytes, wanted {wanted:,}{reason}{short}")


@dataclass(frozen=True)
class Stored:
    """Tokens in one file."""

    path: Path
    dtype: np.dtype[Any]
    tokens: int
    offset: int = 0
    """Bytes before the first one."""

    def read(self, start: int, count: int) -> Tokens:
        """`count` tokens, as unsigned numbers: a negative one becomes a large one.

        The file is not memory-mapped: one that is cut short in the meantime would end the process.
        """
        size = self.dtype.itemsize
        with open_regular(self.path) as file:
            file.seek(self.offset + start * size)
            content = file.read(count * size)
        if len(content) != count * size:
            end = self.offset + start * size + len(content)
            raise ValueError(
                f"{self.path}: found its end at byte {end:,}, wanted it at "
                f"{self.offset + self.tokens * size:,}: it was cut while it was read"
            )
        return unsigned(np.frombuffer(content, self.dtype))

    def cut(self, tokens: int) -> Iterator["Stored"]:
        """Parts of so many tokens, the last of fewer; at least one."""
        for start in range(0, max(1, self.tokens), tokens):
            count = min(tokens, self.tokens - start)
            offset = self.offset + start * self.dtype.itemsize
            yield Stored(self.path, self.dtype, count, offset)

    def pieces(self, start: int, end: int) -> Iterator[Tokens]:
        """The tokens from `start` to before `end`, window by window."""
        for at in range(start, end, WINDOW_TOKENS):
            yield self.read(at, min(WINDOW_TOKENS, end - at))


def unsigned(tokens: NDArray[Any]) -> Tokens:
    """Whole numbers in this machine's byte order, in which no negative one is a valid id."""
    kind = tokens.dtype.newbyteorder("=")
    return tokens.astype(kind, copy=False).view(f"u{kind.itemsize}")


@dataclass(frozen=True)
class Joined:
    """Tokens in parts of which each goes on where the one before ends."""

    parts: tuple[Stored, ...]

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """The number of tokens before each part, and that of all."""
        return np.cumsum([0, *(part.tokens for part in self.parts)], dtype=np.int64)

    def read(self, start: int, count: int) -> Tokens:
        """As of `Stored`; fewer tokens where a part ends in them, but one at least."""
        number = int(np.searchsorted(self.starts, start, "right")) - 1
        count = min(count, int(self.starts[number + 1]) - start)
        return self.parts[number].read(start - int(self.starts[number]), count)

    def pieces(self, start: int, end: int) -> Iterator[Tokens]:
        """As of `Stored`."""
        while start < end:
            piece = self.read(start, min(WINDOW_TOKENS, end - start))
            yield piece
            start += piece.size


def batches(
    stored: Stored, blocks: Iterator[NDArray[np.int64]], first: int, last: int
) -> Iterator["Batch"]:
    """Batches of whole items, from number `first` to before `last`.

    A batch has about a window of tokens, or is one longer item.

    Args:
        blocks: the ends of all items, ascending.
    """
    start = number = 0
    for block in blocks:
        low, high = (min(max(0, one - number), block.size) for one in (first, last))
        if low:
            start = int(block[low - 1])
        number += block.size
        ends = block[low:high]
        at = 0
        while at < ends.size:
            after = max(at + 1, int(np.searchsorted(ends, start + WINDOW_TOKENS, "right")))
            end = int(ends[after - 1])
            yield stored.read(start, end - start), ends[at:after] - start
            start, at = end, after
        if number >= last:
            return


def gathered(items: Iterator[Tokens]) -> Iterator["Batch"]:
    """Items that are read one by one, as batches of about a window."""
    waiting: list[Tokens] = []
    size = 0
    for item in items:
        waiting.append(item)
        # An empty item has a cost too.
        size += item.size + 1
        if size >= WINDOW_TOKENS:
            yield _batch(waiting)
            waiting, size = [], 0
    if waiting:
        yield _batch(waiting)


def _batch(items: Sequence[Tokens]) -> "Batch":
    return np.concatenate(items), np.cumsum([item.size for item in items], dtype=np.int64)


Batch = tuple[Tokens, NDArray[np.int64]]
"""Tokens of whole items, and the number of tokens before the end of each."""
