"""GPT-2's byte pairs of JSON-escaped text, as LongCrawl64 was tokenized, for transformers."""

import json
import re
from typing import Any

from transformers import PreTrainedTokenizerFast

_ESCAPE = re.compile(r"\\(u.{4}|u.*\Z|[^u])", re.DOTALL)
_SHORT = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\", "/": "/"}


class LonghaulTokenizer(PreTrainedTokenizerFast):
    """Escapes texts before they are encoded, and unescapes what is decoded."""

    def _encode_plus(self, text: Any, text_pair: Any = None, **kwargs: Any) -> Any:
        return super()._encode_plus(_escaped(text), _escaped(text_pair), **kwargs)

    def _decode(self, *args: Any, **kwargs: Any) -> str:
        text = _ESCAPE.sub(_unescaped, super()._decode(*args, **kwargs))
        # Joins the halves of pairs; a half alone becomes U+FFFD.
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _escaped(text: Any) -> Any:
    """A text, or texts and pairs of them in lists."""
    if isinstance(text, str):
        return json.dumps(text)[1:-1]
    return type(text)(map(_escaped, text)) if isinstance(text, (list, tuple)) else text


def _unescaped(escape: re.Match[str]) -> str:
    """What an escape stands for; what is none stays as it is."""
    if len(escape[1]) < 5:
        return _SHORT.get(escape[1], escape[0])
    try:
        return chr(int(escape[1][1:], 16))
    except ValueError:
        return escape[0]
