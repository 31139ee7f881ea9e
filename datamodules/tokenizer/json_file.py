"""The tokenizer of a Hugging Face tokenizer.json."""

import functools
import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from longhaul.datamodules.decoding import FileDecoder, StreamDecoder
from longhaul.datamodules.files.untrusted import shown
from longhaul.datamodules.native import foreign_content
from longhaul.datamodules.tokenizer.base import (
    BOS_NAMES,
    EOT_NAMES,
    FileTokenizer,
    Ids,
    find_token,
)
from longhaul.datamodules.tokenizer.cutting import PIECE_CHARACTERS, cut_up

_NEVER = -1e4  # a log-probability far below that of any other way to read a few characters
_WORDS = "two words"


class JsonTokenizer(FileTokenizer):
    """The tokenizer of a Hugging Face tokenizer.json.

    Where the file has no pre-tokenizer that divides a text into words, long texts are encoded in
    pieces. Their ids are those of the whole text, unless a token of the file holds a space after
    another character, or there is no white space in thousands of characters: then a token at a cut
    may be two.

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
        end = find_token(where, "eos", eos, EOT_NAMES, vocabulary)
        if end is None:
            raise ValueError(
                f"{where}: no end-of-text token, wanted one of {', '.join(EOT_NAMES)}, or "
                "`eos_token` in a tokenizer_config.json beside it, or --eos TOKEN"
            )
        begin = find_token(where, "bos", bos, BOS_NAMES, vocabulary) or end
        (self._eot, self.eot_id), (self._bos, self.bos_id) = end, begin
        with foreign_content(self._where, "not a tokenizer.json"):
            self._split_special_tokens(self._tokenizer)

    def _encode(self, text: str, goes_on: bool) -> Ids:
        with foreign_content(self._where, "cannot encode text"):
            is_whole = len(text) <= PIECE_CHARACTERS or self._finds_words
        pieces = [text] if is_whole else cut_up(text)
        ids: list[int] = []
        for number, piece in enumerate(pieces):
            ids += self._encode_piece(piece, goes_on or number > 0)
        return np.array(ids, np.int64)

    def _encode_piece(self, text: str, goes_on: bool) -> list[int]:
        tokenizer = self._inner if goes_on else self._tokenizer
        with foreign_content(self._where, "cannot encode text"):
            # The only call that does not compute where in the text each token lies.
            (found,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
            ids: list[int] = found.ids
        if self.eot_id in ids:
            tokenizer = self._inner_without_end if goes_on else self._without_end
            with foreign_content(self._where, "cannot encode text"):
                ids = tokenizer.encode(text, add_special_tokens=False).ids
        if self.eot_id in ids:  # of a model of whole words, or one that is a single character
            raise ValueError(
                f"{self._where}: found its end-of-text token, {shown(self._eot)}, among the ids of "
                "a text, wanted a token that no text has (--eos TOKEN)"
            )
        return ids

    @functools.cached_property
    def _finds_words(self) -> bool:
        """Whether it divides a text into words first, and merges within them alone."""
        words, split = self._tokenizer.normalizer, self._tokenizer.pre_tokenizer
        text = _WORDS if words is None else words.normalize_str(_WORDS)
        return split is not None and len(split.pre_tokenize_str(text)) > 1

    @functools.cached_property
    def _inner(self) -> Any:
        """The tokenizer for a piece that is not the first of its text."""
        values = json.loads(self.content)
        return self._variant(values) if _remove_prefix(values) else self._tokenizer

    @functools.cached_property
    def _without_end(self) -> Any:
        """The tokenizer for the rare text in which the model itself, no added token, finds it."""
        return self._variant(self.without_end())

    @functools.cached_property
    def _inner_without_end(self) -> Any:
        values = self.without_end()
        _remove_prefix(values)
        return self._variant(values)

    def _variant(self, values: dict[str, Any]) -> Any:
        with foreign_content(self._where, "cannot encode text"):
            tokenizer = _load(json.dumps(values).encode())
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


def _load(content: bytes) -> Any:
    # Imported here, because it is slow and only this tokenizer needs it.
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_str(content.decode())
    # A file may configure truncation or padding to the context of a model.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _remove_prefix(values: dict[str, Any]) -> bool:
    """Remove what puts a space before a text from the values of a file that the library has read.

    Returns whether there was anything.
    """
    found = False
    for role, nested in (("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers")):
        step = values.get(role)
        if step is None:
            continue
        steps, kept = step[nested] if step["type"] == "Sequence" else [step], []
        for one in steps:
            if one["type"] == "Prepend":
                found = True
                continue
            if one["type"] == "Metaspace":
                found, one["prepend_scheme"] = True, "never"
                one.pop("add_prefix_space", None)  # of older files
            elif one["type"] == "ByteLevel" and one.get("add_prefix_space"):
                found, one["add_prefix_space"] = True, False
            kept.append(one)
        values[role] = {"type": "Sequence", nested: kept} if kept else None
    return found
