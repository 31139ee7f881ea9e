"""What a file of tokens gives: items with bounds, or a stream, and the documents of each."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from longhaul.datamodules.preparation.documents import Document
from longhaul.datamodules.preparation.token_files.ids import Vocabulary
from longhaul.datamodules.preparation.token_files.stored import (
    WINDOW_TOKENS,
    Batch,
    Joined,
    Stored,
    batches,
)
from longhaul.datamodules.shards import Tokens

Separator = Literal["before", "after", "both", "none"]


class Items(ABC):
    """A file, or files, whose items are one document each."""

    name: str
    """Relative to what the user named."""
    files: tuple[Path, ...]
    """What is read."""
    unit = "document"
    """What its items are called in messages."""

    @abstractmethod
    def batches(self) -> Iterator[Batch]:
        """Its items in order. ValueError, in one line, where it is damaged."""


class StoredItems(Items):
    """Items that stand back to back, any of which can be read without those before."""

    stored: Stored
    documents: int

    @abstractmethod
    def ends(self) -> Iterator[NDArray[np.int64]]:
        """How many tokens lie before the end of each document, in blocks."""

    def batches(self) -> Iterator[Batch]:
        return self.batches_of(0, self.documents)

    def batches_of(self, first: int, last: int) -> Iterator[Batch]:
        """The documents from number `first` to before `last`."""
        return batches(self.stored, self.ends(), first, last)


@dataclass(frozen=True)
class Stream:
    """A file of tokens in which separators alone tell where documents end."""

    name: str
    stored: tuple[Stored, ...]
    """The parts of the file, of which each goes on where the one before ends."""
    group: str | None = None
    """Streams of one group, next to each other, are one: a text runs on into the next file."""
    number: int | None = None
    """Its place in the group. None: the text does not run on into it."""

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.stored[0].path,)


@dataclass
class ItemsUnit:
    """The documents of items. A separator within one ends a document too."""

    name: str
    items: Items
    vocabulary: Vocabulary
    separator: Separator
    part: tuple[int, int] | None = None
    """Of StoredItems, the numbers of its first document and of the one after its last."""

    def documents(self) -> Iterator[Document]:
        """As of `Unit`: an item without a token is an empty document."""
        before = 0
        found = self.items.batches()
        if self.part is not None and isinstance(self.items, StoredItems):
            before = self.part[0]
            found = self.items.batches_of(*self.part)
        for tokens, ends in found:
            starts = np.concatenate([[0], ends[:-1]])
            cuts = self.vocabulary.separators(tokens)
            self._check(tokens, ends, cuts, before)
            first = np.searchsorted(cuts, starts)
            last = np.searchsorted(cuts, ends)
            for number, (start, end, low, high) in enumerate(
                zip(starts.tolist(), ends.tolist(), first.tolist(), last.tolist(), strict=True),
                start=before + 1,
            ):
                part = 0
                for cut in (*cuts[low:high].tolist(), end):
                    if cut > start:
                        part += 1
                        name = f"{self.name}#{number}" + (f".{part}" if part > 1 else "")
                        yield Document(name, partial(_pieces, tokens[start:cut]))
                    start = cut + 1
                if not part:
                    yield Document(f"{self.name}#{number}", partial(_pieces, tokens[:0]))
            before += ends.size

    def _check(self, tokens: Tokens, ends: np.ndarray, cuts: np.ndarray, before: int) -> None:
        if tokens.size and int(tokens.max()) >= self.vocabulary.size:
            at = int(np.argmax(tokens >= self.vocabulary.size))
            item = int(np.searchsorted(ends, at, "right"))
            whole = tokens[int(ends[item - 1]) if item else 0 : int(ends[item])]
            self.vocabulary.check(
                whole, str(self.items.files[0]), before + item + 1, self.items.unit
            )
        if self.separator == "none" and cuts.size:
            item = int(np.searchsorted(ends, cuts[0], "right"))
            where = f"{self.items.unit} {before + item + 1:,}"
            raise _found_one(self.items.files[0], int(tokens[cuts[0]]), where)


def _pieces(tokens: Tokens) -> Iterator[Tokens]:
    for at in range(0, tokens.size, WINDOW_TOKENS):
        yield tokens[at : at + WINDOW_TOKENS]


@dataclass
class StreamUnit:
    """The documents that begin in one of the files of a stream; the last may end in another."""

    name: str
    stream: Joined
    parts: tuple[int, int]
    """The numbers of its first part among those of the stream, and of the first after its own."""
    origin: int
    """The number of the part with which its file begins. A document is called after the file and
    the number of its first token there."""
    vocabulary: Vocabulary
    separator: Separator
    validation_fraction: float = 0.0
    """The share, at its end, of a file without separators that is for validation."""

    def documents(self) -> Iterator[Document]:
        """As of `Unit`; two separators in a row have no document between them."""
        begin, end = (int(self.stream.starts[part]) for part in self.parts)
        origin = int(self.stream.starts[self.origin])
        if self.separator == "none":
            for at, window in self._windows(begin, end):
                if (cuts := self.vocabulary.separators(window)).size:
                    place = f"token {at - origin + int(cuts[0]):,}"
                    raise _found_one(self._path, int(window[cuts[0]]), place)
            left = end - round((end - begin) * self.validation_fraction)
            for is_validation, bounds in ((False, (begin, left)), (True, (left, end))):
                if bounds[0] < bounds[1]:
                    pieces = partial(self.stream.pieces, *bounds)
                    yield Document(self.name, pieces, is_validation)
            return
        # Where the next document begins. None where a text runs on from the file before.
        start: int | None = begin
        if begin and not self.vocabulary.separators(self.stream.read(begin - 1, 1)).size:
            start = None
        for at, window in self._windows(begin, end):
            for cut in self.vocabulary.separators(window).tolist():
                if start is not None and at + cut > start:
                    whole = start >= at
                    yield Document(
                        f"{self.name}#{start - origin}",
                        partial(_pieces, window[start - at : cut])
                        if whole
                        else partial(self.stream.pieces, start, at + cut),
                    )
                start = at + cut + 1
        if start is not None and start < end:
            yield Document(
                f"{self.name}#{start - origin}", partial(self.stream.pieces, start, self._end(end))
            )

    @property
    def _path(self) -> Path:
        return self.stream.parts[self.parts[0]].path

    def _windows(self, begin: int, end: int) -> Iterator[tuple[int, Tokens]]:
        at, origin = begin, int(self.stream.starts[self.origin])
        while at < end:
            window = self.stream.read(at, min(WINDOW_TOKENS, end - at))
            self.vocabulary.check(window, str(self._path), at - origin)
            yield at, window
            at += window.size

    def _end(self, at: int) -> int:
        """Where the first document ends that has tokens before and after `at`."""
        total = int(self.stream.starts[-1])
        while at < total:
            window = self.stream.read(at, min(WINDOW_TOKENS, total - at))
            if (cuts := self.vocabulary.separators(window)).size:
                return at + int(cuts[0])
            at += window.size
        return total


def _found_one(path: Path, token: int, where: str) -> ValueError:
    return ValueError(
        f"{path}: found id {token:,}, which begins or ends a text, at {where}, wanted none "
        "(--separator none); --separator before, after or both divides there"
    )
