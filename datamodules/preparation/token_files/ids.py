"""Refuses ids that the tokenizer does not have, and says how else the bytes could be read."""

import logging
from pathlib import Path
from typing import Any

import numpy as np

from longhaul.datamodules.preparation.token_files.stored import RAW_TYPES, Stored, unsigned
from longhaul.datamodules.shards import Tokens
from longhaul.datamodules.tokenizer import Tokenizer

_log = logging.getLogger(__name__)
_GUESSED = (("uint16", "uint32"), ("uint16be", "uint32be"))
_SAMPLE_BYTES = 1 << 20
_SWAPPED = "byte-swapped all fit: big endian"


class Vocabulary:
    """What a reader needs to know of a tokenizer. It is pickled with the units."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.name = tokenizer.name
        self.sha256 = tokenizer.sha256
        self.size = tokenizer.vocab_size
        self.bos_id = tokenizer.bos_id
        self.eot_id = tokenizer.eot_id

    def check(self, tokens: Tokens, place: str, first: int, unit: str = "token") -> None:
        """Raise ValueError at an id that the tokenizer does not have.

        Args:
            tokens: the ids.
            place: the file.
            first: the number of the first of them in it, or of the record that they stand in.
            unit: "token", or what the file has instead.
        """
        if not tokens.size or int(tokens.max()) < self.size:
            return
        at = int(np.argmax(tokens >= self.size))
        number = first + at if unit == "token" else first
        swapped = tokens.byteswap()
        hint = ""
        if tokens.itemsize > 1 and int(swapped.max()) < self.size:
            hint = f"; {_SWAPPED}"
        raise ValueError(
            f"{place}: found id {int(tokens[at]):,} at {unit} {number:,}, wanted ids below "
            f"{self.size:,} of {self.name}{hint}"
        )

    def separators(self, tokens: Tokens) -> Any:
        """Where an id stands that begins or ends a text."""
        found = tokens == self.eot_id
        if self.bos_id != self.eot_id:
            found |= tokens == self.bos_id
        return np.flatnonzero(found)


def raw_tokens(path: Path, raw: str | None, vocabulary: Vocabulary) -> Stored:
    """A file that is nothing but tokens.

    Raises:
        ValueError: `raw`, the name of their type, is missing or cannot be right.
    """
    size = path.stat().st_size
    if raw is None:
        fits = _fitting(path, vocabulary)
        hint = f"; {fits} {vocabulary.name}" if fits else f"; neither fits {vocabulary.name}"
        kind = " no numpy header and" if path.suffix == ".npy" else ""
        raise ValueError(f"{path}: found{kind} no --raw, wanted --raw uint16 or uint32{hint}")
    dtype = RAW_TYPES[raw]
    if not size or size % dtype.itemsize:
        raise ValueError(
            f"{path}: found {size:,} bytes, wanted a multiple of {dtype.itemsize} (--raw {raw}): "
            "a cut copy, or another type"
        )
    stored = Stored(path, dtype, size // dtype.itemsize)
    head = stored.read(0, min(stored.tokens, _SAMPLE_BYTES // dtype.itemsize))
    try:
        vocabulary.check(head, str(path), 0)
    except ValueError as error:
        if str(error).endswith(_SWAPPED):
            raise ValueError(f"{error}, --raw {_swapped(raw)}") from None
        fits = _fitting(path, vocabulary)
        raise ValueError(f"{error}; {fits}" if fits else str(error)) from None
    if dtype.itemsize == 2 and vocabulary.size > 1 << 16:
        _log.warning(
            "%s: ids of 65,536 and more, which %s has, were wrapped when they were written as %s",
            *(path, vocabulary.name, raw),
        )
    if _is_wider(head, vocabulary):
        wider = f"uint{16 * dtype.itemsize}"
        raise ValueError(
            f"{path}: found every second id at most {(vocabulary.size - 1) >> 8 * dtype.itemsize}, "
            f"wanted ids of {raw}; they look like halves of {wider} (--raw)"
        )
    return stored


def _fitting(path: Path, vocabulary: Vocabulary) -> str:
    """The types as which the first tokens would be ids of the tokenizer, with the largest one."""
    with path.open("rb") as file:
        content = file.read(_SAMPLE_BYTES)
    # Little-endian files are the rule, and bytes of one kind may pass for the other.
    for names in _GUESSED:
        found = []
        for name in names:
            dtype = RAW_TYPES[name]
            if path.stat().st_size % dtype.itemsize or not content:
                continue
            ids = unsigned(np.frombuffer(content, dtype))
            if int(ids.max()) < vocabulary.size and not _is_wider(ids, vocabulary):
                found.append(f"{name} (largest id {int(ids.max()):,})")
        if found:
            return f"{' or '.join(found)} fits"
    return ""


def _swapped(raw: str) -> str:
    return raw.removesuffix("be") if raw.endswith("be") else f"{raw}be"


def _is_wider(ids: Tokens, vocabulary: Vocabulary) -> bool:
    """Whether the ids look like the halves of wider ones."""
    if ids.size < 16 or ids.size % 2 or ids.itemsize not in (1, 2):
        return False
    most = (vocabulary.size - 1) >> 8 * ids.itemsize
    low, high = ids[::2], ids[1::2]
    # Ids of which every second one is so small are no text of any tokenizer.
    return int(high.max()) <= most and bool((low > most).mean() > 0.5)
