"""The tokenizer of a file of tiktoken's ranks: a line of base64 and a rank for each token.

Such a file holds neither the pattern that divides a text into words nor the special tokens. Both
are those of a published tokenizer, whose name `--pattern` gives and the copy's file name repeats.
"""

import base64
import hashlib
import re
from collections.abc import Sequence

import numpy as np

from longhaul.datamodules.decoding import REPLACEMENT, BytesDecoder, StreamDecoder
from longhaul.datamodules.files.untrusted import shown
from longhaul.datamodules.native import foreign_content
from longhaul.datamodules.tokenizer.base import (
    END_OF_TEXT,
    FileTokenizer,
    Ids,
    as_id,
    find_token,
)

_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERNS = {
    "llama3": _CL100K,
    "cl100k": _CL100K,
    "o200k": rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
}
"""The regular expressions of words, in a form that tiktoken and tokenizers read alike."""

_LLAMA3 = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    *(f"<|reserved_special_token_{number}|>" for number in range(4)),
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|reserved_special_token_4|>",
    "<|eot_id|>",
    *(f"<|reserved_special_token_{number}|>" for number in range(5, 251)),
)
# How far behind the last rank each special token is, from 0.
_SPECIAL = {
    "llama3": {name: place for place, name in enumerate(_LLAMA3)},
    "cl100k": {
        **{END_OF_TEXT: 1, "<|fim_prefix|>": 2, "<|fim_middle|>": 3, "<|fim_suffix|>": 4},
        "<|endofprompt|>": 20,
    },
    "o200k": {END_OF_TEXT: 1, "<|endofprompt|>": 20},
    "gpt2": {END_OF_TEXT: 0},
}
_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} [0-9]{1,10}(\r?\n|$)")
_MOST_IDS = 1 << 32


def is_ranks(content: bytes) -> bool:
    """Whether the first line is one of tiktoken's."""
    return _LINE.match(content) is not None


def pattern_in(name: str) -> str | None:
    """The pattern that the name of a copy beside shards repeats, None in any other name."""
    return next((one for one in PATTERNS if name == f"tokenizer.{one}.tiktoken"), None)


class RanksTokenizer(FileTokenizer):
    """The tokenizer of a file of tiktoken's ranks.

    Args:
        content: the bytes of the file.
        where: path or URL of the file, for error messages.
        pattern: one of PATTERNS; also decides the special tokens, whose ids follow the last rank.
        bos, eos: as of `build_tokenizer`. An id behind the ranks may have any number.

    Raises:
        ValueError: the file is damaged, or there is no such pattern or token.
    """

    def __init__(
        self,
        content: bytes,
        where: str,
        *,
        pattern: str | None,
        bos: str | int | None = None,
        eos: str | int | None = None,
    ) -> None:
        if pattern not in PATTERNS:
            found = "tiktoken ranks without pattern" if pattern is None else shown(pattern)
            raise ValueError(f"{where}: found {found}, wanted --pattern {'|'.join(PATTERNS)}")
        # Imported here, because only tokenizers of ranks need it.
        import tiktoken

        self.content = content
        self.name = f"tokenizer.{pattern}.tiktoken"
        self.pattern = pattern
        self._options = {"pattern": pattern}
        self.ranks = _parse(content, where)
        """The rank of each token, given by its bytes."""
        digest = hashlib.sha256(content).hexdigest()
        self.sha256 = hashlib.sha256(f"{digest} with the words of {pattern}".encode()).hexdigest()
        self._where = where
        count = len(self.ranks)
        special = {name: count + place for name, place in _SPECIAL[pattern].items()}
        for role, given in (("bos", bos), ("eos", eos)):
            number = as_id(given)
            if number is not None and number not in special.values():
                if not count <= number < _MOST_IDS:
                    raise ValueError(
                        f"{where}: {role} is {number}, wanted an id of no text, from {count} on "
                        f"(--{role} TOKEN)"
                    )
                special[f"<|special_{number}|>"] = number
        names = [f"<|{place}_of_text|>" for place in ("begin", "end")]
        end = find_token(where, "eos", eos, (names[1], END_OF_TEXT), special)
        assert end is not None  # every pattern has one
        begin = find_token(where, "bos", bos, names[:1], special) or end
        self.eot_id, self.bos_id = end[1], begin[1]
        self.special = special
        """The ids of the special tokens."""
        self.vocab_size = max(special.values()) + 1
        with foreign_content(where, "not a file of tiktoken ranks"):
            self._encoding = tiktoken.Encoding(
                self.name,
                pat_str=PATTERNS[pattern],
                mergeable_ranks=self.ranks,
                special_tokens=special,
            )

    def _encode(self, text: str, goes_on: bool) -> Ids:
        with foreign_content(self._where, "cannot encode text"):
            ids = self._encoding.encode_ordinary(text)
        return np.array(ids, np.int64)

    def stream_decoder(self, after: Sequence[int] = ()) -> StreamDecoder:
        return BytesDecoder(self._bytes_of)

    def _bytes_of(self, token: int) -> bytes:
        # There are gaps between special tokens, and the embedding of a model may have more rows.
        try:
            return self._encoding.decode_single_token_bytes(token)
        except (KeyError, OverflowError):
            return REPLACEMENT.encode()


def _parse(content: bytes, where: str) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(keepends=True), start=1):
        if not _LINE.fullmatch(line):
            raise ValueError(
                f"{where}:{number}: found {shown(line)}, wanted a line of base64, a space and a "
                "rank"
            )
        token, rank = line.split()
        try:
            key = base64.b64decode(token, validate=True)
        except ValueError:
            raise ValueError(f"{where}:{number}: found {shown(token)}, wanted base64") from None
        if int(rank) != len(ranks) or key in ranks:
            raise ValueError(
                f"{where}:{number}: found rank {shown(int(rank))} of {shown(key)}, wanted a token "
                f"that is new, of rank {len(ranks)}"
            )
        ranks[key] = int(rank)
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ValueError(f"{where}: found no rank of byte {missing[0]}, wanted one of each byte")
    return ranks
