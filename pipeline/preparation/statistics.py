"""Counts the documents of shards: how long they are, which are equal, which ids they have."""

import hashlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from longhaul.datamodules.manifest import Manifest
from longhaul.datamodules.shards import Shard, Tokens
from longhaul.datamodules.store import ShardStore
from longhaul.pipeline.preparation.digests import DIGEST_BYTES, Digests

_BINS = 64
# A packer puts all pieces of a document within so many tokens. What is still not whole then has
# lost its end, and is not waited for any longer.
_MOST_WAITING = 64 << 20
# A piece that comes too early is held until those before it have come: so many tokens in all.
_MOST_HELD = 32 << 20
_SAMPLES, _SAMPLE_TOKENS = 3, 96


class Piece(NamedTuple):
    """The part of a document that lies in one block."""

    name: str | None
    """Of the document; None if it was prepared without names."""
    first: int | None
    """Number of the first token within the document; None likewise."""
    start: int
    """Number of the first token within the block."""
    end: int
    """Of the token after the last one."""
    text_end: int
    """As `end`, without the id that ends the document."""
    is_last: bool
    """Whether the document ends with it."""


class Sample(NamedTuple):
    """The beginning of a piece, and where it is."""

    shard: str
    block: int
    piece: Piece
    tokens: Tokens


class Bin(NamedTuple):
    """The documents of `low` to `high` tokens, their ends included."""

    low: int
    high: int
    documents: int
    tokens: int


@dataclass
class Statistics:
    """What `measure` has found."""

    documents: int = 0
    cut: int = 0
    """Documents whose end is missing: dropped after the last block, or cropped."""
    bins: list[Bin] = field(default_factory=list)
    """Powers of two, from the shortest documents to the longest."""
    duplicates: int | None = None
    """Documents that have the tokens of an earlier one. None: not looked for."""
    not_compared: int = 0
    """Documents whose pieces are so far out of their order that they were not compared."""
    smallest_id: int | None = None
    largest_id: int | None = None
    samples: list[Sample] = field(default_factory=list)
    """The beginnings of documents in the first, the middle and the last block."""


def measure(
    manifest: Manifest,
    *,
    reads_all: bool = True,
    progress: Callable[[int], None] = lambda tokens: None,
) -> Statistics:
    """Count the documents of shards.

    Memory does not grow with the corpus. Remote shards are fetched one after the other into a
    temporary folder.

    Args:
        manifest: of the shards.
        reads_all: otherwise only where documents end, without hashes of shards or documents. That
            takes little time where the shards hold the ends, and they must be local.
        progress: called with the number of tokens read so far.

    Raises:
        ShardError: a shard is missing or damaged.
        OSError: one cannot be read.
    """
    found = Statistics()
    counts = _Counts(reads_all)
    shown = {round(i * (manifest.num_blocks - 1) / (_SAMPLES - 1)) for i in range(_SAMPLES)}
    done = 0
    for number, shard in enumerate(_shards(manifest, reads_all)):
        for block, start in enumerate(shard.starts):
            tokens = shard.tokens[start : start + manifest.document_tokens]
            pieces = pieces_of(shard, block, manifest)
            counts.add(tokens, pieces)
            if reads_all:
                least, most = int(tokens.min()), int(tokens.max())
                before = found.smallest_id, found.largest_id
                found.smallest_id = least if before[0] is None else min(least, before[0])
                found.largest_id = most if before[1] is None else max(most, before[1])
                if done in shown:
                    # Rather the beginning of a document than the rest of one.
                    begun = (one for one in pieces if one.first == 0 or one.start or not done)
                    piece = next(begun, pieces[0])
                    end = min(piece.end, piece.start + _SAMPLE_TOKENS)
                    begin = tokens[piece.start : end].copy()
                    found.samples.append(Sample(manifest.shards[number].name, block, piece, begin))
            done += 1
            progress(done * manifest.document_tokens)
    counts.finish(found)
    return found


def pieces_of(shard: Shard, number: int, manifest: Manifest) -> list[Piece]:
    """The documents in a block, in their order; a block of LongCrawl64 without ends is one."""
    length, eot = manifest.document_tokens, manifest.eot_id
    tokens = shard.tokens[shard.starts[number] : shard.starts[number] + length]
    texts = shard.texts(number)
    is_row = not shard.ends and manifest.source.get("kind") == "longcrawl64"
    if shard.ends:
        ends = shard.ends[number].tolist()
    elif is_row:
        ends = [length]
    else:
        ends = (np.flatnonzero(tokens == eot) + 1).tolist()
        ends += [length] if not ends or ends[-1] < length else []
    pieces = []
    for place, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        name, first = texts[place] if texts is not None else (None, None)
        has_eot = int(tokens[end - 1]) == eot
        is_last = has_eot or end < length or is_row
        pieces.append(Piece(name, first, start, end, end - has_eot, is_last))
    return pieces


def open_store(manifest: Manifest, cache_dir: str) -> ShardStore:
    """The shards of a manifest, of which remote ones are copied into a folder."""
    return ShardStore(
        manifest, cache_dir=cache_dir, replaces_bad=False, max_bad_fraction=0.0, keep_open=1
    )


def _shards(manifest: Manifest, is_checked: bool) -> Iterator[Shard]:
    if not is_checked:
        has_ends, dtype = manifest.boundaries == "ends", np.dtype(manifest.dtype)
        for entry in manifest.shards:
            path = Path(manifest.url_of(entry.name))
            yield Shard(path, entry, manifest.document_tokens, dtype, has_ends=has_ends)
        return
    with tempfile.TemporaryDirectory(prefix="longhaul-shards-") as folder:
        store = open_store(manifest, folder)
        for position in range(len(store)):
            yield store[position]
            # What is mapped stays readable.
            for copy in Path(folder).iterdir():
                copy.unlink()


@dataclass
class _Waiting:
    """A document of which pieces are missing."""

    has_begun: bool = False
    seen: int = 0
    length: int | None = None
    """Known once its last piece was seen."""
    digest: Any = None
    """Of its first tokens. None: they are not compared."""
    digested: int = 0
    """How many those are."""
    early: dict[int, tuple[int, Tokens]] = field(default_factory=dict)
    """The size and text of pieces behind them, by the number of the first token."""
    touched: int = 0
    """Tokens of the corpus before its newest piece."""


class _Counts:
    """Documents by their length, from pieces in the order of the blocks."""

    def __init__(self, compares: bool) -> None:
        self._digests = Digests() if compares else None
        self._documents, self._tokens = [0] * _BINS, [0] * _BINS
        self._waiting: dict[str | None, _Waiting] = {}
        self._read = self._cut = self._not_compared = self._held = 0

    def add(self, tokens: Tokens, pieces: list[Piece]) -> None:
        for piece in pieces:
            self._add(tokens[piece.start : piece.text_end], piece)
        self._read += tokens.size
        for name in [*self._waiting]:
            if self._read - self._waiting[name].touched <= _MOST_WAITING:
                break
            self._end_cut(self._waiting.pop(name))

    def finish(self, found: Statistics) -> None:
        """Put what was counted into `found`."""
        for waiting in self._waiting.values():
            self._end_cut(waiting)
        found.documents, found.cut = sum(self._documents), self._cut
        found.not_compared = self._not_compared
        found.duplicates = None if self._digests is None else self._digests.repeated()
        used = [power for power, count in enumerate(self._documents) if count]
        for power in range(used[0], used[-1] + 1) if used else ():
            low, high = 1 << power, (2 << power) - 1
            found.bins.append(Bin(low, high, self._documents[power], self._tokens[power]))

    def _add(self, text: Tokens, piece: Piece) -> None:
        waiting = self._waiting.pop(piece.name, None)
        first = piece.first
        if first is None:  # Without names, what goes on does so at the beginning of a block.
            first = waiting.seen if waiting is not None and piece.start == 0 else 0
        if first == 0 and waiting is not None and waiting.has_begun:
            self._end_cut(waiting)
            waiting = None
        size = piece.end - piece.start
        if waiting is None:
            if first == 0 and piece.is_last:
                self._end(size, self._new_digest(text))
                return
            waiting = _Waiting(digest=self._new_digest(text[:0]))
        if waiting.digest is not None:
            self._digest(waiting, first, size, text)
        waiting.has_begun = waiting.has_begun or first == 0
        waiting.seen += size
        waiting.touched = self._read
        if piece.is_last:
            waiting.length = first + size
        if waiting.seen == waiting.length:
            self._end(waiting.seen, self._digest_of(waiting))
        else:
            # At the end: the one that was touched first is the first to be given up.
            self._waiting[piece.name] = waiting

    def _digest(self, waiting: _Waiting, first: int, size: int, text: Tokens) -> None:
        """Digest a piece, and those behind it that came earlier; or hold it until its turn."""
        if first != waiting.digested:
            if self._held + size > _MOST_HELD or first in waiting.early:
                waiting.digest = self._digest_of(waiting, gives_up=True)
                return
            waiting.early[first] = size, text.copy()
            self._held += size
            return
        waiting.digest.update(text.data)
        waiting.digested += size
        while (held := waiting.early.pop(waiting.digested, None)) is not None:
            waiting.digest.update(held[1].data)
            waiting.digested += held[0]
            self._held -= held[0]

    def _digest_of(self, waiting: _Waiting, *, gives_up: bool = False) -> Any:
        """The digest of a document, None if pieces are still held, which are let go."""
        is_whole = not waiting.early and not gives_up
        self._held -= sum(size for size, _ in waiting.early.values())
        waiting.early.clear()
        return waiting.digest if is_whole else None

    def _new_digest(self, text: Tokens) -> Any:
        if self._digests is None:
            return None
        return hashlib.blake2b(text.data, digest_size=DIGEST_BYTES)

    def _end(self, length: int, digest: Any) -> None:
        power = length.bit_length() - 1
        self._documents[power] += 1
        self._tokens[power] += length
        if self._digests is not None and digest is None:
            self._not_compared += 1
        elif self._digests is not None:
            self._digests.add(digest.digest())

    def _end_cut(self, waiting: _Waiting) -> None:
        self._cut += 1
        self._end(waiting.seen, self._digest_of(waiting))
