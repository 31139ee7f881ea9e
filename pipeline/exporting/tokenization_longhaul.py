"""GPT-2's byte pairs of JSON-escaped text, which is how LongCrawl64 was tokenized."""

import json
import re
from typing import Any

from transformers import PreTrainedTokenizerFast

_ESCAPE = re.compile(r"\\(u.{4}|u.*\Z|[^u])", re.DOTALL)
_SHORT = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\", "/": "/"}


class LonghaulTokenizer(PreTrainedTokenizerFast):
    """Escapes texts before encoding, and unescapes them after decoding."""

    def _encode_plus(self, text: Any, text_pair: Any = None, **kwargs: Any) -> Any:
        return super()._encode_plus(_escaped(text), _escaped(text_pair), **kwargs)

    def _decode(self, *args: Any, **kwargs: Any) -> str:
        text = _ESCAPE.sub(_unescaped, super()._decode(*args, **kwargs))
        # Joins surrogate halves into characters; a single half becomes U+FFFD.
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _escaped(text: Any) -> Any:
    """The escaped text, or list or tuple of texts."""
    if isinstance(text, str):
        return json.dumps(text)[1:-1]
    return type(text)(map(_escaped, text)) if isinstance(text, (list, tuple)) else text


def _unescaped(escape: re.Match[str]) -> str:
    """The character of an escape; an invalid escape is returned unchanged."""
    if len(escape[1]) < 5:
        return _SHORT.get(escape[1], escape[0])
    try:
        return chr(int(escape[1][1:], 16))
    except ValueError:
        return escape[0]
