"""Megatron's pairs of .bin and .idx, and those of fairseq and DeepSpeed, with the same magic.

The .idx is, packed: magic, `<Q` version, `<B` type, `<Q` sequences S, `<Q` entries of the document
index D, then the lengths (`<i4` S), the byte offsets (`<i8` S), and the first sequence of each
document (`<i8` D, from 0 to S). A multimodal one adds a byte a sequence. fairseq's has no D and no
document index. The older TNTIDX has offsets in tokens instead of lengths. Only the size of the file
tells which of them it is.
"""

import logging
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from longhaul.datamodules.preparation.token_files.sources import StoredItems
from longhaul.datamodules.preparation.token_files.stored import RAW_TYPES, Stored, check_size

_log = logging.getLogger(__name__)

MAGIC = b"MMIDIDX\0\0"
OLD_MAGIC = b"TNTIDX\0\0"
_TYPES = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 8: "u2"}
# uint16 and uint32 in DeepSpeed, and floats elsewhere, in one order or the other.
_DISPUTED = (6, 7)
_BLOCK = 1 << 16


@dataclass(frozen=True)
class _Index:
    """What an .idx says, with its arrays as `Stored`, which are read in blocks."""

    code: int
    sequences: int
    lengths: Stored | None
    """Tokens of each sequence; None in a TNTIDX."""
    offsets: Stored
    """Where each sequence begins in the .bin: bytes, or tokens in a TNTIDX, and then one more."""
    documents: Stored | None
    """The first sequence of each document, and the number of sequences. None: one a document."""


@dataclass(frozen=True)
class Megatron(StoredItems):
    name: str
    files: tuple[Path, ...]
    stored: Stored
    documents: int
    index: _Index

    def ends(self) -> Iterator[NDArray[np.int64]]:
        index = self.index
        if index.documents is None:
            for _, ends in _ends_of_sequences(index, 0, index.sequences):
                yield ends
            return
        before = 0
        for at in range(0, index.documents.tokens - 1, _BLOCK):
            count = min(_BLOCK + 1, index.documents.tokens - at)
            bounds = index.documents.read(at, count).view(np.int64)
            first, last = int(bounds[0]), int(bounds[-1])
            found = [np.array([before], np.int64)]
            found += [ends for _, ends in _ends_of_sequences(index, first, last, before)]
            after = np.concatenate(found)  # (sequences of these documents + 1,)
            before = int(after[-1])
            yield after[bounds[1:] - first]


def open_megatron(name: str, bin_path: Path, idx_path: Path, raw: str | None) -> Megatron:
    """The documents of a pair.

    Args:
        raw: the type of the tokens where the code in the .idx is one that projects disagree about.

    Raises:
        ValueError: it is damaged, or holds no tokens.
    """
    index = _read_index(idx_path)
    tokens = _check_lengths(idx_path, index)
    if index.code in _TYPES:
        dtype = np.dtype(_TYPES[index.code])
        if index.code == 8 and bin_path.stat().st_size == 8 * tokens != 0:  # DeepSpeed's
            dtype = np.dtype("u8")
    elif index.code in _DISPUTED and raw is not None:
        dtype = RAW_TYPES[raw]
    else:
        why = " (projects disagree about 6 and 7); --raw says which"
        raise ValueError(
            f"{idx_path}: found dtype code {index.code}, wanted 1 to 5 or 8, which are whole "
            f"numbers{why if index.code in _DISPUTED else ''}"
        )
    why = f"the .idx counts {tokens:,} tokens of {dtype.name}"
    check_size(bin_path, tokens * dtype.itemsize, why)
    _check_offsets(idx_path, index, dtype.itemsize)
    entries = index.documents
    documents = index.sequences if entries is None else max(0, entries.tokens - 1)
    stored = Stored(bin_path, dtype, tokens)
    return Megatron(name, (bin_path, idx_path), stored, documents, index)


def _read_index(path: Path) -> _Index:
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(56).ljust(56, b"\0")
    if head.startswith(MAGIC):
        version, code, sequences, entries = struct.unpack_from("<QBQQ", head, 9)
        whole = {34 + 12 * sequences + 8 * entries: 34, 26 + 12 * sequences: 26}
        with_modes = 34 + 13 * sequences + 8 * entries
        if size == with_modes and sequences:
            _check_modes(path, Stored(path, np.dtype("u1"), sequences, size - sequences))
            whole[size] = 34
    elif head.startswith(OLD_MAGIC):
        version, code, _, sequences, sizes, entries = struct.unpack_from("<6Q", head, 8)
        arrays = 8 * (2 * (sequences + 1) + sizes)
        whole = {56 + arrays + 8 * entries: 56, 48 + arrays: 48}
    else:
        raise ValueError(f"{path}: found another file, wanted an .idx of Megatron beside the .bin")
    if version != 1:
        raise ValueError(f"{path}: found version {version}, wanted 1")
    if size not in whole:
        # In the place of the number of entries fairseq has 0, or the lengths of two sequences.
        wanted = list(whole)[0 if 0 < entries < 1 << 32 else -1]
        raise ValueError(
            f"{path}: found {size:,} bytes, wanted {wanted:,} for {sequences:,} sequences: a cut "
            "copy"
        )
    start = whole[size]
    has_documents = start in (34, 56)
    wide = np.dtype("<i8")
    if head.startswith(MAGIC):
        lengths = Stored(path, np.dtype("<i4"), sequences, start)
        offsets = Stored(path, wide, sequences, start + 4 * sequences)
        after = start + 12 * sequences
    else:
        lengths = None
        offsets = Stored(path, wide, sequences + 1, start + 8 * (sequences + 1))
        after = start + arrays
    documents = Stored(path, wide, entries, after) if has_documents else None
    if documents is not None:
        _check_documents(path, documents, sequences)
    return _Index(code, sequences, lengths, offsets, documents)


def _check_modes(path: Path, modes: Stored) -> None:
    if any(block.any() for block in modes.pieces(0, modes.tokens)):
        raise ValueError(f"{path}: found sequences of other modes than text, wanted text alone")


def _check_documents(path: Path, documents: Stored, sequences: int) -> None:
    """Raise unless the document index ascends from 0 to the number of sequences."""
    last = 0
    for number, block in enumerate(documents.pieces(0, documents.tokens)):
        bounds = np.concatenate([[0 if number == 0 else last], block.view(np.int64)])
        if (number == 0 and block[0] != 0) or (np.diff(bounds) < 0).any():
            raise ValueError(f"{path}: found a document index that falls, wanted it to grow from 0")
        last = int(bounds[-1])
    if last != sequences:
        raise ValueError(
            f"{path}: found a document index that ends at {last:,}, wanted {sequences:,}, the "
            "number of sequences"
        )


def _check_lengths(path: Path, index: _Index) -> int:
    """The tokens of all sequences; raises at a negative length."""
    total = 0
    for lengths, ends in _ends_of_sequences(index, 0, index.sequences):
        if (lengths < 0).any():
            raise ValueError(f"{path}: found a negative length, wanted 0 tokens and more")
        total = int(ends[-1])
    return total


def _check_offsets(path: Path, index: _Index, itemsize: int) -> None:
    """Warn where offsets differ from what the lengths add up to, and are not used.

    Several versions of Megatron computed them in integers of 32 bits.
    """
    if index.lengths is None:
        return
    at = 0
    for lengths, ends in _ends_of_sequences(index, 0, index.sequences):
        offsets = index.offsets.read(at, ends.size).view(np.int64)
        wrong = np.flatnonzero(offsets != (ends - lengths) * itemsize)
        if wrong.size:
            _log.warning(
                "%s: the offset of sequence %d differs from the lengths before it, which are used",
                *(path, at + int(wrong[0])),
            )
            return
        at += ends.size


def _ends_of_sequences(
    index: _Index, first: int, last: int, before: int = 0
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """The lengths of sequences, and how many tokens there are up to the end of each, in blocks."""
    for at in range(first, last, _BLOCK):
        count = min(_BLOCK, last - at)
        if index.lengths is None:
            offsets = index.offsets.read(at, count + 1).view(np.int64)
            yield np.diff(offsets), offsets[1:]
            continue
        lengths = index.lengths.read(at, count).view(np.int32).astype(np.int64)
        ends = before + np.cumsum(lengths)
        before = int(ends[-1])
        yield lengths, ends
