"""Whole numbers as people type them: 65_536, 1e9, 10B, 4k, 4Ki."""

import logging
import re
from fractions import Fraction

logger = logging.getLogger(__name__)

LENGTHS = {
    *("context", "contexts", "lengths", "stride", "chunk_size"),
    *("doc_tokens", "document_tokens", "longest_document"),
    *("window", "learned_positions", "original_max_position_embeddings"),
}
"""Keys and options that are the length of one sequence, where k is 1,024 and M is 1,048,576."""

_UNITS = "kmbt"  # thousand, million, billion, trillion; G is another name of B
_WITH_UNIT = re.compile(r"(\d[\d_]*(?:\.\d+)?) ?([kmbgt])(i?)", re.ASCII | re.IGNORECASE)
_NUMBER = re.compile(r"\d[\d_]*(?:\.\d*)?(?:e\+?\d{1,2})?", re.ASCII | re.IGNORECASE)
_warned: set[str] = set()


def with_unit(text: str, name: str) -> int | None:
    """The whole number in text such as 10B; None if it is none with a unit.

    k, M, B (or G) and T are powers of 1,000, and Ki, Mi, Gi and Ti powers of 1,024. Only in the
    length of a sequence k, M and B are powers of 1,024 too: people say 4k and mean 4,096. Bytes may
    be written as 200GB or 64GiB. What was understood goes to the log.

    Args:
        text: what was typed.
        name: the key or the option, which tells what is counted.
    """
    text = number = text.strip()
    if name.endswith("bytes"):
        number = re.sub("(?<=[kmgti])b$", "", text, flags=re.IGNORECASE)
    match = _WITH_UNIT.fullmatch(number)
    if match is None:
        return None
    digits, unit, binary = match.groups()
    power = _UNITS.index(unit.lower().replace("g", "b")) + 1
    is_length = name.rpartition(".")[2].lstrip("-").replace("-", "_") in LENGTHS
    value = Fraction(digits.replace("_", "")) * (1024 if binary or is_length else 1000) ** power
    if value.denominator != 1:
        return None
    warning = f"{name}: {text} is {int(value):,}"
    if warning not in _warned:  # a config is read more than once
        _warned.add(warning)
        logger.info("%s", warning)
    return int(value)


def parse_count(text: str, name: str) -> int:
    """The whole number, 0 or more, in the text of an option.

    Raises:
        ValueError: it is none.
    """
    value = with_unit(text, name)
    if value is None and _NUMBER.fullmatch(text):
        number = Fraction(text.replace("_", ""))
        value = int(number) if number.denominator == 1 else None
    if value is None:
        raise ValueError(f"{name}: found {text!r}, wanted a whole number, such as 4096, 4k or 1e6")
    return value
