"""What reaches a terminal: text without control characters, whoever wrote it.

Names of folders, values in files and messages of other programs may hold sequences that move the
cursor, change what was printed before, or set the title. All output passes here: messages of the
command line and of loggers are one line of bounded length each, and whatever else is written has
its control characters shown as escapes, but for generated texts that go to a file. What another
program prints comes here through `run_shown`.
"""

import codecs
import io
import logging
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO, cast

from longhaul.datamodules.files.plain_text import plain

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
    """Context in which stdout and stderr show control characters as escapes, as loggers do."""
    before = sys.stdout, sys.stderr
    for stream in before:
        if isinstance(stream, io.TextIOWrapper):
            # What the terminal's encoding lacks is shown as \\u00e9: no text may end a command.
            stream.reconfigure(errors="backslashreplace")
    sys.stdout, sys.stderr = (cast(TextIO, _Plain(stream)) for stream in before)
    handler = logging.StreamHandler()
    handler.setFormatter(MessageFormatter())
    logging.basicConfig(handlers=[handler], level=logging.INFO)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def exact_stdout() -> TextIO:
    """Stdout for texts that a file or another program gets as they are, and a terminal does not."""
    stream: Any = sys.stdout
    return stream.stream if isinstance(stream, _Plain) and not stream.isatty() else sys.stdout


def run_shown(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> int:
    """Run a program, whose output goes to stderr without control characters; return its status.

    What it writes is shown as it comes, progress bars too.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        try:
            while chunk := process.stdout.read1(1 << 16):  # type: ignore[attr-defined]
                sys.stderr.write(plain(decoder.decode(chunk), _KEPT))
                sys.stderr.flush()
            sys.stderr.write(decoder.decode(b"", final=True))
        except BaseException:
            process.kill()
            raise
    return process.returncode


class _Plain:
    """A stream that shows control characters as escapes."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        self.stream.write(plain(text, _KEPT))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
