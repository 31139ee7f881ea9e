"""The tokenizer of a SentencePiece model, which the package sentencepiece reads."""

import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from longhaul.datamodules.decoding import REPLACEMENT, BytesDecoder, StreamDecoder
from longhaul.datamodules.files.untrusted import shown
from longhaul.datamodules.native import foreign_content
from longhaul.datamodules.tokenizer.base import (
    BOS_NAMES,
    EOT_NAMES,
    FileTokenizer,
    Ids,
    find_token,
)
from longhaul.datamodules.tokenizer.cutting import cut_up

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
# A message of protobuf that is appended to another one changes its values: the third of the
# normalizer, itself the third of the model, is whether a space is put before a text.
_WITHOUT_PREFIX, _WITH_PREFIX = b"\x1a\x02\x18\x00", b"\x1a\x02\x18\x01"


class SentencePieceTokenizer(FileTokenizer):
    """The tokenizer of a SentencePiece model.

    Long texts are encoded in pieces. Their ids are those of the whole text, unless a piece of the
    model holds a space after another character, or there is no white space in thousands of
    characters: then a piece at a cut may be two. What the model's normalizer drops is lost.

    Args:
        content: the bytes of the file.
        where: path or URL of the file, for error messages.
        bos, eos: as of `build_tokenizer`, without the tokenizer_config.json.

    Raises:
        ValueError: sentencepiece is not installed, the file is no model, or has no such token.
    """

    name = "tokenizer.model"

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
        self._model = self._load(b"")
        self.vocab_size = self._model.get_piece_size()
        names = [self._model.id_to_piece(number) for number in range(self.vocab_size)]
        vocabulary = {name: number for number, name in enumerate(names)}
        own = {"bos": self._model.bos_id(), "eos": self._model.eos_id()}
        bos, eos = (
            own[role] if given is None and own[role] >= 0 else given
            for role, given in (("bos", bos), ("eos", eos))
        )
        end = find_token(where, "eos", eos, EOT_NAMES, vocabulary)
        if end is None:
            raise ValueError(
                f"{where}: no end-of-text token, wanted one of {', '.join(EOT_NAMES)}, or "
                "`eos_token` in a tokenizer_config.json beside it, or --eos TOKEN"
            )
        begin = find_token(where, "bos", bos, BOS_NAMES, vocabulary) or end
        (self._eot, self.eot_id), self.bos_id = end, begin[1]

    def _load(self, more: bytes) -> Any:
        try:
            # Imported here, because only this tokenizer needs it.
            from sentencepiece import SentencePieceProcessor
        except ImportError:
            raise ValueError(
                f"{self._where}: found a SentencePiece model, which the package sentencepiece "
                "reads, wanted it installed (pip install 'longhaul[sentencepiece]')"
            ) from None
        with foreign_content(self._where, "not a SentencePiece model"):
            model = SentencePieceProcessor()
            model.LoadFromSerializedProto(self.content + more)
            return model

    @functools.cached_property
    def _without_prefix(self) -> Any:
        return self._load(_WITHOUT_PREFIX)

    @functools.cached_property
    def _with_prefix(self) -> Any:
        return self._load(_WITH_PREFIX)

    def _encode(self, text: str, goes_on: bool) -> Ids:
        ids: list[int] = []
        for number, piece in enumerate(cut_up(text)):
            model = self._model
            if goes_on or number:
                # The model may drop a space at the beginning, but not the one that it puts there.
                is_word = piece[:1] == " " and not piece[1:2].isspace()
                model = self._with_prefix if is_word else self._without_prefix
                piece = piece[1:] if is_word else piece
            with foreign_content(self._where, "cannot encode text"):
                ids += model.encode(piece)
        if self.eot_id in ids:  # of a piece that is no control symbol
            raise ValueError(
                f"{self._where}: found its end-of-text token, {shown(self._eot)}, among the ids of "
                "a text, wanted a token that no text has (--eos TOKEN)"
            )
        return np.array(ids, np.int64)

    def stream_decoder(self, after: Sequence[int] = ()) -> StreamDecoder:
        is_first = self._has_prefix and all(map(self._is_control, after))

        def bytes_of(token: int) -> bytes:
            nonlocal is_first
            content = self._bytes_of(token)
            if is_first and not self._is_control(token):
                is_first = False
                content = content.removeprefix(b" ")
            return content

        return BytesDecoder(bytes_of)

    def _is_control(self, token: int) -> bool:
        return token < self.vocab_size and bool(self._model.is_control(token))

    def _bytes_of(self, token: int) -> bytes:
        # The embedding of a model may have more rows than there are ids, as padding.
        if token >= self.vocab_size or self._model.is_unknown(token):
            return REPLACEMENT.encode()
        piece: str = self._model.id_to_piece(token)
        if self._model.is_byte(token):
            return bytes([int(piece[3:5], 16)])
        return piece.replace(_SPACE, " ").encode()

    @functools.cached_property
    def _has_prefix(self) -> bool:
        """Whether it puts a space before a text."""
        with foreign_content(self._where, "cannot encode text"):
            pieces: list[str] = self._model.encode("a", out_type=str)
        return bool(pieces) and pieces[0].startswith(_SPACE)
