"""Guesses from the first documents where an id stands that begins or ends a text."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from longhaul.datamodules.preparation.token_files.ids import Vocabulary
from longhaul.datamodules.preparation.token_files.sources import Items, Separator, Stream
from longhaul.datamodules.shards import Tokens

_DOCUMENTS = 1_000
_STREAM_TOKENS = 1 << 22


class Found(NamedTuple):
    """Where separators stand, and by what that is known."""

    separator: Separator
    reason: str
    """Such as "of the first 1,000 documents 998 end with id 50,256"."""


def find_separator(
    sources: Sequence[Items | Stream], vocabulary: Vocabulary, given: Separator | None
) -> Found:
    """Where separators stand in these sources; they are looked at even where that is `given`.

    Raises:
        ValueError: `given` cannot be right.
    """
    ids = {vocabulary.bos_id, vocabulary.eot_id}
    named = " or ".join(f"{one:,}" for one in sorted(ids))
    bounded = [source for source in sources if isinstance(source, Items)]
    streams = [source for source in sources if isinstance(source, Stream)]
    if bounded:
        found = _of_items(bounded, ids, named)
    else:
        found = _of_streams(streams, vocabulary, named)
    if given is None or given == found.separator:
        return found
    if given != "none" and found.separator == "none":
        raise ValueError(
            f"{sources[0].files[0]}: {found.reason}, wanted one {_PLACES[given]} text "
            f"(--separator {given}); without it, --separator none"
        )
    return Found(given, f"--separator; {found.reason}")


_PLACES = {"before": "before each", "after": "after each", "both": "before and after each"}


def _of_items(sources: Sequence[Items], ids: set[int], named: str) -> Found:
    count = begin = end = within = 0
    last = Counter[int]()
    for item in _first_items(sources):
        last[int(item[-1])] += 1
        count += 1
        is_separator = np.isin(item, list(ids))
        begin += bool(is_separator[0])
        end += bool(is_separator[-1])
        within += bool(is_separator[1:-1].any())
    kinds: dict[tuple[bool, bool], Separator] = {
        (True, True): "both",
        (True, False): "before",
        (False, True): "after",
        (False, False): "none",
    }
    kind = kinds[2 * begin > count, 2 * end > count]
    if kind == "none" and begin + end + within:
        # Samples of several texts, of which few begin or end where a sample does.
        kind = "after" if end >= begin else "before"
    reason = (
        f"of the first {count:,} documents {begin:,} begin with id {named}, {end:,} end with it, "
        f"{within:,} have it within"
    )
    token, times = max(last.items(), key=lambda one: one[1], default=(0, 0))
    if kind == "none" and times > 0.9 * count > 1:
        reason += f"; {times:,} end with id {token:,}, which --eos may name"
    return Found(kind, reason)


def _first_items(sources: Sequence[Items]) -> Iterator[Tokens]:
    """The first items that have tokens."""
    left = _DOCUMENTS
    for source in sources:
        for tokens, ends in source.batches():
            start = 0
            for end in ends.tolist():
                if end > start:
                    yield tokens[start:end]
                    left -= 1
                    if not left:
                        return
                start = end


def _of_streams(streams: Sequence[Stream], vocabulary: Vocabulary, named: str) -> Found:
    read: list[Tokens] = []
    left = _STREAM_TOKENS
    for part in (part for stream in streams for part in stream.stored):
        read.append(part.read(0, min(part.tokens, left)))
        left -= read[-1].size
        if not left:
            break
    tokens = np.concatenate(read)
    places = vocabulary.separators(tokens)
    if not places.size:
        return Found("none", f"the first {tokens.size:,} tokens have no id {named}")
    reason = f"of the first {tokens.size:,} tokens {places.size:,} have id {named}"
    if vocabulary.bos_id == vocabulary.eot_id:
        kind: Separator = "before" if places[0] == 0 else "after"
    else:
        present = np.unique(tokens[places])
        if present.size == 2:
            kind = "both"
        else:
            kind = "after" if present[0] == vocabulary.eot_id else "before"
    return Found(kind, reason)
