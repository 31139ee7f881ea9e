"""A key as users give it: a path with dots through a record, such as `doc.text`."""

from collections.abc import Iterator, Mapping
from typing import Any

from longhaul.datamodules.files.untrusted import one_line, shown

TEXT_KEY = "text"
"""The key of the texts, unless another is given."""

# An error names so many keys.
_MOST_NAMED = 12


def path_of(record: object, key: str) -> list[str] | None:
    """The names, from the record inwards, of what a key names; None if it is not there.

    A name goes before a path: `doc.text` is the field of that name, if there is one, and else
    `text` of `doc`. The path ends at what is null on the way.
    """
    names: list[str] = []
    while isinstance(record, Mapping):
        if key in record:
            return [*names, key]
        first, dot, rest = key.partition(".")
        if not dot or first not in record:
            return None
        names.append(first)
        record, key = record[first], rest
    return names if names and record is None else None


def value_at(record: Any, path: list[str]) -> Any:
    """What a path of names leads to."""
    for name in path:
        record = record[name]
    return record


def found_keys(record: object) -> str:
    """The keys of a record, those of records within it with dots, as the end of a message."""
    names = [shown(name)[1:-1] for _, name in zip(range(_MOST_NAMED), _keys(record), strict=False)]
    more = ", ..." if len(names) == _MOST_NAMED else ""
    return one_line(f"found {', '.join(names) or 'no key'}{more}; --text-key names another")


def _keys(record: object, before: str = "") -> Iterator[str]:
    if isinstance(record, Mapping):
        for name, value in record.items():
            # One level of nesting is what corpora have.
            if isinstance(value, Mapping) and value and not before:
                yield from _keys(value, f"{name}.")
            else:
                yield f"{before}{name}"
