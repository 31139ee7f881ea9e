"""Makes text from outside harmless to a terminal."""

import re

# Control characters of both sets, and those that turn the direction of text or break lines.
_CONTROLS = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufff9-\ufffb]"
)


def plain(text: str, keep: str = "") -> str:
    """The text with its control characters shown as escapes.

    Args:
        text: from any source.
        keep: control characters that stay as they are.
    """
    return _CONTROLS.sub(
        lambda match: match[0] if match[0] in keep else ascii(match[0])[1:-1], text
    )
