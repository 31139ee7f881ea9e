"""Streaming decoders: text from ids that arrive one by one, never half a character."""

import codecs
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


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

    _SHORT: ClassVar = {
        "b": "\b",
        "f": "\f",
        "n": "\n",
        "r": "\r",
        "t": "\t",
        '"': '"',
        "\\": "\\",
        "/": "/",
    }

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
        if escape[1] != "u":
            return self._join_surrogates(self._SHORT.get(escape[1], escape))
        try:
            return self._join_surrogates(chr(int(escape[2:], 16)))
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
    """Decodes with a Hugging Face tokenizer, whose own decoder waits for whole characters."""

    def __init__(self, tokenizer: Any) -> None:
        # Imported here, because it is slow and only this decoder needs it.
        from tokenizers.decoders import DecodeStream

        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=False)
        self._ids: list[int] = []
        self._shown = 0

    def push(self, token: int) -> str:
        self._ids.append(token)
        text = self._stream.step(self._tokenizer, token) or ""
        self._shown += len(text)
        return text

    def flush(self) -> str:
        text: str = self._tokenizer.decode(self._ids, skip_special_tokens=False)
        return text[self._shown :]


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
