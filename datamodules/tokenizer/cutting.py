"""Cuts long texts for tokenizers that do not divide them into words themselves.

Such a tokenizer searches the whole text for the next pair to merge, in time that grows faster than
the text. Pieces of bounded length take time in proportion to it.
"""

import re
from collections.abc import Iterator

PIECE_CHARACTERS = 10_000
"""The most in a piece."""

# In the order of preference. A piece begins with the space, since a word includes the one before.
_PLACES = (re.compile(r"(?<=\S) (?=\S)"), re.compile(r"(?<=\S)\s"))


def cut_up(text: str) -> Iterator[str]:
    """The text in consecutive pieces, cut in front of white space where there is any.

    A piece has at least half of PIECE_CHARACTERS, but for the last one.
    """
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        end = start + PIECE_CHARACTERS
        middle = start + PIECE_CHARACTERS // 2
        for place in _PLACES:
            # The last one; what follows it must be seen too.
            *_, found = [None, *place.finditer(text, middle, end + 1)]
            if found is not None and found.start() < end:
                end = found.start()
                break
        yield text[start:end]
        start = end
    yield text[start:]
