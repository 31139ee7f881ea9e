"""What reaches a terminal: text without control characters, whoever wrote it.

Names of folders, values in files and messages of other programs may hold sequences that move the
cursor, change what was printed before, or set the title. All output passes here: messages of the
command line and of loggers are one line of bounded length each, and whatever else is written to a
terminal has its control characters shown as escapes.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

from longhaul.datamodules.plain_text import plain

LONGEST_LINE = 1200
"""Characters of a message."""

# Ends of lines, tabs, and the return to the beginning of the line that progress bars need.
_KEPT = "\n\t\r"


def message(text: object) -> str:
    """A message as one line of bounded length, without control characters."""
    line = plain(" ".join(str(text).split()))
    return line if len(line) <= LONGEST_LINE else f"{line[: LONGEST_LINE - 3]}..."


class PlainFormatter(logging.Formatter):
    """Formats a record in the lines that it has, without other control characters."""

    def format(self, record: logging.LogRecord) -> str:
        return plain(super().format(record), _KEPT)


class MessageFormatter(logging.Formatter):
    """Formats a record as one line of bounded length, without its traceback."""

    def format(self, record: logging.LogRecord) -> str:
        return f"longhaul: {message(record.getMessage())}"


@contextmanager
def plain_terminal() -> Iterator[None]:
    """Context in which stderr, and stdout where it is a terminal, show control characters only.

    A file or a program that reads stdout gets the text as it is.
    """
    before = sys.stdout, sys.stderr
    sys.stderr = cast(TextIO, _Plain(sys.stderr))
    if sys.stdout.isatty():
        sys.stdout = cast(TextIO, _Plain(sys.stdout))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


class _Plain:
    """A stream that shows control characters as escapes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(plain(text, _KEPT))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
