"""Streaming decoders: text from ids that arrive one by one, never half a character."""

import codecs
import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from longhaul.datamodules.native import foreign_content

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Ids with which others are decoded, since decoders treat the first of a text in a way of its own.
_CONTEXT = 16


class StreamDecoder(Protocol):
    """Decodes a sequence of ids that arrive one by one."""

    def push(self, token: int) -> str:
        """The text that this id completes; "" while a character or an escape is incomplete."""
        ...

    def flush(self) -> str:
        """The rest of the text at the end; incomplete characters become U+FFFD."""
        ...


class BytesDecoder:
    """Decodes tokens that stand for bytes. Incomplete UTF-8 waits; invalid UTF-8 is U+FFFD."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._utf8.decode(self._bytes_of(token))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class UnescapingDecoder:
    """Undoes JSON escapes in the output of another decoder. Anything else is left unchanged."""

    def __init__(self, inner: StreamDecoder) -> None:
        self._inner = inner
        self._escape = ""
        self._high = ""

    def push(self, token: int) -> str:
        return "".join(map(self._take, self._inner.push(token)))

    def flush(self) -> str:
        text = "".join(map(self._take, self._inner.flush()))
        text += self._join_surrogates(self._escape)
        self._escape = ""
        return text

    def _take(self, char: str) -> str:
        if not self._escape and char != "\\":
            return self._join_surrogates(char)
        self._escape += char
        escape = self._escape
        if len(escape) == 1 or (escape[1] == "u" and len(escape) < 6):
            return ""
        self._escape = ""
        try:
            return self._join_surrogates(json.loads(f'"{escape}"'))
        except ValueError:
            return self._join_surrogates(escape)

    def _join_surrogates(self, text: str) -> str:
        """`text`, joined with a waiting high surrogate. A surrogate without its pair is U+FFFD."""
        high, self._high = self._high, ""
        if high and "\udc00" <= text <= "\udfff":
            return (high + text).encode("utf-16", "surrogatepass").decode("utf-16")
        before = REPLACEMENT if high else ""
        if len(text) == 1 and "\ud800" <= text <= "\udbff":
            self._high = text
            return before
        if len(text) == 1 and "\udc00" <= text <= "\udfff":
            return before + REPLACEMENT
        return before + text


class FileDecoder:
    """Decodes with a Hugging Face tokenizer, whose `decode` of all ids gives the same text.

    Text is shown as soon as no further id can change it. The library's own stream raises on some
    ids and shows other text on others: bytes in a row that are not UTF-8 as a whole are one U+FFFD
    each, so nothing of them is certain before they end.
    """

    def __init__(
        self, tokenizer: Any, after: Sequence[int] = (), where: str = "tokenizer.json"
    ) -> None:
        """`after` are ids before the first one, whose text is not shown, such as a prompt's.

        Calls of the tokenizer that fail, in whatever way, raise ValueError; `where` begins it.
        """
        self._tokenizer = tokenizer
        self._where = where
        self._is_local = _is_local(tokenizer.decoder)
        # Ids of which each might follow: one that spoils bytes before it, and one that ends them.
        self._probes = _spoiling_byte(tokenizer), _first_plain(tokenizer)
        self._ids = list(after[-_CONTEXT:])
        self._shown = len(self._decode(self._ids))

    def push(self, token: int) -> str:
        self._ids.append(token)
        if not self._is_local:
            return ""
        text = self._decode(self._ids)
        # Bytes at the end that are no character yet are U+FFFD.
        certain = text.rstrip(REPLACEMENT)
        for probe in self._probes:
            if probe is not None:
                certain = _common_prefix(certain, self._decode([*self._ids, probe]))
        new = certain[self._shown :]
        self._shown += len(new)
        if len(self._ids) > 2 * _CONTEXT and self._shown == len(text):
            self._forget(text)
        return new

    def flush(self) -> str:
        return self._decode(self._ids)[self._shown :]

    def _decode(self, ids: Sequence[int]) -> str:
        with foreign_content(self._where, "cannot decode ids"):
            text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def _forget(self, text: str) -> None:
        """Keep only the last ids as context if these have the same text alone, all of it shown."""
        context = self._ids[-_CONTEXT:]
        alone = self._decode(context)
        if alone and text.endswith(alone):
            self._ids, self._shown = context, len(alone)


def _common_prefix(one: str, other: str) -> str:
    pairs = enumerate(zip(one, other, strict=False))
    return one[: next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))]


def _is_local(decoder: Any) -> bool:
    """Whether an id changes only the text of ids next to it: not if a step works on joined text."""
    if decoder is None:
        return True
    steps = [json.loads(decoder.__getstate__())]
    is_joined = False
    while steps:
        step = steps.pop(0)
        if step["type"] == "Sequence":
            steps = [*step["decoders"], *steps]
        elif is_joined and step["type"] not in ("Fuse", "Strip"):
            return False
        is_joined = is_joined or step["type"] in ("Fuse", "ByteLevel")
    return True


def _spoiling_byte(tokenizer: Any) -> int | None:
    """The id of a byte that is no character, nor the end of one together with bytes before it."""
    names = (f"<0x{byte:02{case}}>" for byte in range(255, 127, -1) for case in "Xx")
    return next((i for name in names if (i := tokenizer.token_to_id(name)) is not None), None)


def _first_plain(tokenizer: Any) -> int | None:
    """The first id that stands for no byte."""
    ids = range(tokenizer.get_vocab_size())
    return next((i for i in ids if not (tokenizer.id_to_token(i) or "<0x").startswith("<0x")), None)


class StoppingDecoder:
    """Passes on the output of another decoder up to the first stop string.

    Text that may be the beginning of a stop string waits. The first stop string is the one that
    ends first, so the result does not depend on how ids divide the text.
    """

    def __init__(self, inner: StreamDecoder, stops: Sequence[str]) -> None:
        """`stops` must not contain an empty string."""
        self._inner = inner
        self._stops = stops
        self._waiting = ""
        self.has_stopped = False

    def push(self, token: int) -> str:
        return self._take(self._inner.push(token))

    def flush(self) -> str:
        text = self._take(self._inner.flush()) + self._waiting
        self._waiting = ""
        return text

    def _take(self, text: str) -> str:
        if self.has_stopped:
            return ""
        text = self._waiting + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, end = min(found)
            self._waiting, self.has_stopped = "", True
            return text[:end]
        begun = (n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n]))
        end = len(text) - max(begun, default=0)
        self._waiting = text[end:]
        return text[:end]
