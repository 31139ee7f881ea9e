"""The documents of a source, and the units in which workers read them."""

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from longhaul.datamodules.shards import Tokens


class Document(NamedTuple):
    """One document, read while iterating over its pieces."""

    name: str
    """Path of its file relative to the source, with `#` and a number in a file of several."""

    pieces: Callable[[], Iterator[Tokens]]
    """Its tokens in consecutive pieces, without bos and end-of-text ids."""

    is_validation: bool | None = None
    """Whether it is for validation. None: the hash of its name decides."""


class Unit(Protocol):
    """A part of a source that one worker reads, such as a file or some row groups of one.

    The units of a source have a fixed order, whatever the number of workers. They are pickled.
    """

    @property
    def name(self) -> str:
        """What messages call it."""
        ...

    def documents(self) -> Iterator[Document]:
        """Its documents in a fixed order. ValueError, in one line, where it is damaged."""
        ...
