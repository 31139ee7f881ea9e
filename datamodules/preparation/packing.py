"""Pack the documents of unit files into blocks of one length."""

import heapq
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from longhaul.datamodules.manifest import Dropped
from longhaul.datamodules.preparation.resumable import Cursor
from longhaul.datamodules.preparation.unit_files import UnitFile, unit_sizes
from longhaul.datamodules.shards import Block, Tokens

WINDOW_TOKENS = 16 << 20
"""Best-fit packing sorts the documents of so many tokens at a time."""

_PIECE_TOKENS = 1 << 20


@dataclass(frozen=True)
class Packing:
    """How documents become blocks."""

    block_tokens: int
    """Length of a block."""
    kind: Literal["concat", "best-fit"] = "concat"
    """`concat` joins documents and cuts every block_tokens. `best-fit` puts them into blocks that
    have room for them, and cuts those alone that fill what remains."""
    long: Literal["split", "crop", "drop"] = "split"
    """What happens to a document that is longer than a block, its end included."""
    min_tokens: int = 0
    """Shorter documents, without their end, are dropped."""
    max_tokens: int | None = None
    """Longer ones are dropped. None keeps them."""

    def __post_init__(self) -> None:
        if self.block_tokens < 1:
            raise ValueError(f"--doc-tokens: found {self.block_tokens}, wanted 1 or more")
        if self.min_tokens < 0:
            raise ValueError(f"--min-tokens: found {self.min_tokens}, wanted 0 or more")
        if self.max_tokens is not None and self.max_tokens < max(1, self.min_tokens):
            raise ValueError(
                f"--max-tokens: found {self.max_tokens}, wanted {max(1, self.min_tokens)} or more"
            )


class _Piece(NamedTuple):
    """Consecutive tokens of a document."""

    unit: int
    number: int
    """Of the document in its unit."""
    first: int
    """Number of its first token in the document."""
    tokens: Tokens
    is_last: bool
    """Whether the document ends with it."""


@dataclass
class PackedUnits:
    """The documents of one split, as blocks.

    A cursor of `concat` is [unit, document in it, tokens used of it]. That of `best-fit` has a
    fourth number: blocks written of the window that begins there.
    """

    paths: Sequence[Path]
    """The unit files, in their order."""
    is_validation: bool
    packing: Packing

    version: int = 4
    tokens: int = field(init=False, default=0)
    """Tokens of the documents that are taken."""
    empty_texts: int = field(init=False, default=0)
    dropped: dict[str, Dropped] = field(init=False, default_factory=dict)
    """Documents left out and tokens lost, by reason."""

    def __post_init__(self) -> None:
        lost: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for path in self.paths:
            self.empty_texts += unit_sizes(path).empty[self.is_validation]
            unit = UnitFile(path)
            mine = unit.is_validation == self.is_validation
            left = np.where(mine, unit.lengths, 0).astype(np.int64)
            for reason, leaves in self._reasons(unit).items():
                here = mine & leaves & (left > 0)
                # An end-of-text id that is dropped with its document is none of its tokens.
                kept = self.packing.block_tokens if reason == "crop" else 0
                lost[reason][0] += int(here.sum())
                lost[reason][1] += int((left[here] - 1 - kept).sum())
                left[here] = kept
            self.tokens += int(left.sum())
        self.dropped = {
            reason: Dropped(documents=documents, tokens=tokens)
            for reason, (documents, tokens) in lost.items()
            if documents
        }

    @property
    def dropped_tokens(self) -> int:
        """Tokens at the end that do not fill a block."""
        return self.tokens % self.packing.block_tokens

    def blocks(self, cursor: Cursor | None) -> Iterator[tuple[Block, Cursor]]:
        """Blocks after `cursor` (None: from the start), each with the cursor after it."""
        return self._concatenated(cursor) if self.packing.kind == "concat" else self._fitted(cursor)

    def _reasons(self, unit: UnitFile) -> dict[str, NDArray[np.bool_]]:
        """Which documents are left out or cropped, by reason; the first reason counts."""
        packing, lengths = self.packing, unit.lengths
        reasons = {}
        if packing.min_tokens:
            reasons["min_tokens"] = lengths <= packing.min_tokens
        if packing.max_tokens is not None:
            reasons["max_tokens"] = lengths > packing.max_tokens + 1
        if packing.long != "split":
            reasons[packing.long] = lengths > packing.block_tokens
        return reasons

    def _pieces(self, cursor: Sequence[int]) -> Iterator[_Piece]:
        """The documents that are taken, in pieces. The tokens are valid until the next piece."""
        first_unit, first_document, used = cursor
        for number in range(first_unit, len(self.paths)):
            unit = UnitFile(self.paths[number])
            takes = unit.is_validation == self.is_validation
            cropped = np.zeros_like(takes)
            for reason, leaves in self._reasons(unit).items():
                if reason == "crop":
                    cropped = leaves
                else:
                    takes &= ~leaves
            taken = np.flatnonzero(takes)
            taken = taken[np.searchsorted(taken, first_document) :]
            lengths = np.where(cropped, self.packing.block_tokens, unit.lengths)[taken].tolist()
            starts = (unit.ends - unit.lengths)[taken].tolist()
            for document, start, length in zip(taken.tolist(), starts, lengths, strict=True):
                first = used if document == first_document else 0
                while first < length:
                    stop = min(length, first + _PIECE_TOKENS)
                    tokens = unit.tokens(start + first, start + stop)
                    yield _Piece(number, document, first, tokens, stop == length)
                    first = stop
                used = 0
            first_document = used = 0

    def _name(self, unit: int, number: int) -> str:
        # Units come in order, and only the newest ones are asked for.
        if unit not in self._open:
            while len(self._open) > 8:
                del self._open[min(self._open)]
            self._open[unit] = UnitFile(self.paths[unit])
        return self._open[unit].name(number)

    @cached_property
    def _open(self) -> dict[int, UnitFile]:
        return {}

    def _concatenated(self, cursor: Cursor | None) -> Iterator[tuple[Block, Cursor]]:
        size = self.packing.block_tokens
        block: Tokens = np.empty(0, np.uint16)
        ends: list[int] = []
        texts: list[tuple[str, int]] = []
        filled = 0
        for unit, number, first, tokens, is_last in self._pieces(cursor or [0, 0, 0]):
            at = 0
            while at < tokens.size:
                if filled == 0:
                    block = np.empty(size, tokens.dtype)
                    ends, texts = [], []
                if filled == 0 or first + at == 0:
                    texts.append((self._name(unit, number), first + at))
                taken = min(size - filled, tokens.size - at)
                block[filled : filled + taken] = tokens[at : at + taken]
                filled += taken
                at += taken
                if filled == size or (is_last and at == tokens.size):
                    ends.append(filled)
                if filled == size:
                    yield Block(block, np.array(ends, np.uint32), texts), [unit, number, first + at]
                    filled = 0

    def _fitted(self, cursor: Cursor | None) -> Iterator[tuple[Block, Cursor]]:
        *start, written = cursor or [0, 0, 0, 0]
        while True:
            window, after = self._window(start, max(WINDOW_TOKENS, self.packing.block_tokens))
            if not window:
                return
            rows = best_fit([piece.tokens.size for piece in window], self.packing.block_tokens)
            gaps = len(rows) * self.packing.block_tokens - sum(p.tokens.size for p in window)
            more, after = self._window(after, gaps, is_exact=True)
            full = filled_rows(rows, window, more, self.packing.block_tokens)
            for number, row in enumerate(full, start=1):
                if number > written:
                    here = [*start, number] if number < len(full) else [*after, 0]
                    yield self._block(row), here
            start, written = after, 0

    def _window(
        self, start: Sequence[int], wanted: int, *, is_exact: bool = False
    ) -> tuple[list[_Piece], list[int]]:
        """The next documents with `wanted` tokens or more, in pieces of a block at most, and the
        cursor after them; with `is_exact` not more, so that the last one may be cut."""
        size = self.packing.block_tokens
        window: list[_Piece] = []
        parts: list[Tokens] = []  # of a piece that is not whole yet
        first = waiting = total = 0
        after = list(start)
        if not wanted:
            return window, after
        for unit, number, piece_first, tokens, is_last in self._pieces(start):
            at = 0
            while at < tokens.size:
                if not parts:
                    first = piece_first + at
                room = size - waiting
                if is_exact:
                    room = min(room, wanted - total)
                part = tokens[at : at + room].copy()
                parts.append(part)
                at += part.size
                waiting += part.size
                total += part.size
                is_end = is_last and at == tokens.size
                if waiting == size or is_end or (is_exact and total == wanted):
                    window.append(_Piece(unit, number, first, np.concatenate(parts), is_end))
                    parts, waiting = [], 0
                    after = [unit, number, piece_first + at]
                    if total >= wanted:
                        return window, after
        return window, after

    def _block(self, row: Sequence[_Piece]) -> Block:
        tokens = np.concatenate([piece.tokens for piece in row])
        ends = np.cumsum([piece.tokens.size for piece in row]).astype(np.uint32)
        texts = [(self._name(piece.unit, piece.number), piece.first) for piece in row]
        return Block(tokens, ends, texts)


def best_fit(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Indices of pieces in rows of `size` at most, by best-fit decreasing.

    The longest goes first, each into the row with the least room that is enough, and of such rows
    into the first. A bit for each amount of room tells which ones there are.
    """
    rows: list[list[int]] = []
    with_room: defaultdict[int, list[int]] = defaultdict(list)
    rooms = 0  # bit r: a row has room for r more tokens
    for index in sorted(range(len(lengths)), key=lambda one: (-lengths[one], one)):
        length = lengths[index]
        enough = rooms >> length
        if enough:
            room = length + (enough & -enough).bit_length() - 1
            row = heapq.heappop(with_room[room])
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            room, row = size, len(rows)
            rows.append([])
        rows[row].append(index)
        left = room - length
        if left:
            if not with_room[left]:
                rooms |= 1 << left
            heapq.heappush(with_room[left], row)
    return rows


def filled_rows(
    rows: Sequence[Sequence[int]], window: Sequence[_Piece], more: Sequence[_Piece], size: int
) -> list[list[_Piece]]:
    """Rows of pieces that are full, in the order of their first pieces.

    What comes after the window fills what remains. At the end of the source nothing does: then the
    emptiest rows are taken apart, and fill the others; less than a row is left, and lost.
    """
    fills = [sum(window[index].tokens.size for index in row) for row in rows]
    total = sum(fills) + sum(piece.tokens.size for piece in more)
    # All rows, unless the source has ended.
    order = sorted(range(len(rows)), key=lambda row: (-fills[row], row))
    kept, apart = order[: total // size], order[total // size :]
    spare = [window[index] for index in sorted(index for row in apart for index in rows[row])]
    spare = [*spare, *more][::-1]
    full = []
    for row in sorted(kept, key=lambda row: min(rows[row])):
        pieces = [window[index] for index in sorted(rows[row])]
        left = size - fills[row]
        while left:
            piece = spare.pop()
            if piece.tokens.size > left:
                rest = piece._replace(first=piece.first + left, tokens=piece.tokens[left:])
                spare.append(rest)
                piece = piece._replace(tokens=piece.tokens[:left])
            pieces.append(piece)
            left -= piece.tokens.size
        full.append(pieces)
    return full
