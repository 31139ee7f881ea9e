"""What every tokenizer does, and what those of a file share."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longhaul.datamodules.decoding import StreamDecoder
from longhaul.datamodules.files.untrusted import shown

END_OF_TEXT = "<|endoftext|>"
# Names of the end-of-text and the bos token in published files, most common first.
EOT_NAMES = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<|eot_id|>", "<eos>", "[SEP]", "[EOS]")
BOS_NAMES = ("<s>", "<|begin_of_text|>", "<bos>", "[CLS]", "[BOS]")

_MOST_DIGITS = 10  # of an id, which is below 2^32

Ids = NDArray[np.int64]


class Tokenizer(ABC):
    """Converts text to ids and back."""

    name: str
    """Name of the tokenizer, as the manifest of a corpus stores it."""
    sha256: str
    """Hash of the tokenizer. Equal hashes mean equal ids."""
    vocab_size: int
    """Number of ids: every id is below it."""
    bos_id: int
    """The id in front of a sequence."""
    eot_id: int
    """The id that ends a text."""

    @property
    def identity(self) -> dict[str, Any]:
        """The fields of a manifest that tell whose ids its tokens are."""
        ids = {key: getattr(self, key) for key in ("vocab_size", "bos_id", "eot_id")}
        return {"tokenizer": self.name, "tokenizer_sha256": self.sha256, **ids}

    def encode(self, text: str, *, goes_on: bool = False) -> Ids:
        """The ids of a text, without bos or end-of-text; special tokens in it are plain text.

        Args:
            text: whole, or a piece of one.
            goes_on: whether the text has begun before this piece. Some tokenizers put a space in
                front of a text, which does not belong between its pieces.

        Raises:
            ValueError: the text has a surrogate without its pair, which is no character.
        """
        check_characters(text, "text")
        return self._encode(text, goes_on)

    @abstractmethod
    def _encode(self, text: str, goes_on: bool) -> Ids:
        """As above, of a text whose characters are whole."""

    @abstractmethod
    def stream_decoder(self, after: Sequence[int] = ()) -> StreamDecoder:
        """A decoder for one sequence, whose text follows that of the ids `after`."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of these ids; invalid UTF-8 becomes U+FFFD."""
        decoder = self.stream_decoder()
        return "".join([*(decoder.push(int(token)) for token in ids), decoder.flush()])


class FileTokenizer(Tokenizer):
    """A tokenizer of a file, which is copied beside the shards under the tokenizer's name."""

    content: bytes
    """The bytes of the file."""
    _where: str
    _options: Mapping[str, str] = {}

    def __reduce__(self) -> Any:
        # Some libraries' own pickles forget that special tokens in a text are text.
        given = {"bos": self.bos_id, "eos": self.eot_id, **self._options}
        return _rebuilt, (type(self), self.content, self._where, tuple(given.items()))


# A worker gets the same one with every unit, and building it takes some tenths of a second.
@functools.lru_cache(maxsize=1)
def _rebuilt(
    kind: Callable[..., FileTokenizer], content: bytes, where: str, given: tuple[Any, ...]
) -> FileTokenizer:
    return kind(content, where, **dict(given))


def check_characters(text: str, where: str) -> None:
    """Raise ValueError at a surrogate without its pair, which no encoding of Unicode can write."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where}: found {text[error.start]!a}, half of a surrogate pair, as character "
            f"{error.start + 1:,}, wanted whole characters"
        ) from None


def as_id(given: str | int | None) -> int | None:
    """The id that was given as a number or in digits, None for anything else."""
    if isinstance(given, str):
        return int(given) if given.isdecimal() and len(given) <= _MOST_DIGITS else None
    return given


def find_token(
    where: str,
    role: str,
    given: str | int | None,
    names: Sequence[str],
    vocabulary: Mapping[str, int],
) -> tuple[str, int] | None:
    """The token that was given, or else has one of these names, and its id; None if there is none.

    Args:
        where: path or URL of the file.
        role: `bos` or `eos`, for the message.
        given: its name, or its id, also in digits.
        names: the usual ones.
        vocabulary: ids by name.

    Raises ValueError if what was given is no token.
    """
    if given is None:
        return next(((name, vocabulary[name]) for name in names if name in vocabulary), None)
    if isinstance(given, str) and given in vocabulary:
        return given, vocabulary[given]
    number = as_id(given)
    for name, token in vocabulary.items():
        if token == number:
            return name, token
    raise ValueError(
        f"{where}: {role} is {shown(given)}, which is no token of it (--{role} TOKEN gives another)"
    )
