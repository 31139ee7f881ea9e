"""The texts of JSON lines: of each line's object, the string that a key names."""

import codecs
import json
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import IO

from longhaul.datamodules.files.untrusted import one_line, open_regular
from longhaul.datamodules.preparation.compression import reading
from longhaul.datamodules.preparation.text_files.keys import found_keys, path_of, value_at
from longhaul.datamodules.preparation.text_files.parts import FilePart, parts_from
from longhaul.datamodules.tokenizer import check_characters

# A compressed line may expand to any size.
MOST_TEXT_BYTES = 64 << 20

_COUNTED_BYTES = 1 << 20

_TYPES = {
    bool: "true or false",
    int: "a number",
    float: "a number",
    list: "an array",
    dict: "an object",
}

# No number of a record is used, and Python refuses to convert those of 4,300 digits and more.
_decode = json.JSONDecoder(parse_int=len).decode


def json_texts(file: IO[bytes], path: Path, key: str, part: FilePart) -> Iterator[tuple[int, str]]:
    """Numbers of lines, from 1, and their texts. Lines of white space are skipped.

    Args:
        part: bytes of a file that is not compressed, or WHOLE_FILE.

    Raises:
        ValueError: a line is no object with a string of that name; file and line are named.
    """
    if part.start:
        file.seek(part.start)
    at = part.start
    for number, line in enumerate(_lines(file, path), part.before + 1):
        if part.stop is not None and at >= part.stop:
            return
        at += len(line)
        where = f"{path}:{number}"
        if len(line) > MOST_TEXT_BYTES:
            raise ValueError(
                f"{where}: found a line of more than {MOST_TEXT_BYTES >> 20} MiB, wanted "
                "shorter texts"
            )
        if line.strip():
            yield number, json_text(line, where, key)


def is_json_lines(file: IO[bytes], path: Path) -> bool:
    """Whether the first line is a JSON object, and the next one looks like another.

    One object alone may be anything that programs keep in files.
    """
    lines = (line.removeprefix(codecs.BOM_UTF8).strip() for line in _lines(file, path))
    first, second = islice(chain(filter(None, lines), (b"", b"")), 2)
    if not first.startswith(b"{") or not second.startswith(b"{"):
        return False
    try:
        return isinstance(_decode(first.decode()), dict)
    except (RecursionError, ValueError):
        return False


def _lines(file: IO[bytes], path: Path) -> Iterator[bytes]:
    while line := _next_line(file, path):
        yield line


def _next_line(file: IO[bytes], path: Path) -> bytes:
    with reading(path):
        return file.readline(MOST_TEXT_BYTES + 1)


def parts_of_lines(path: Path, size: int) -> list[FilePart]:
    """Parts of about `size` bytes, each of whole lines. All lines are counted for that."""
    starts = [(0, 0)]
    at = lines = 0
    with open_regular(path) as file:
        while block := file.read(_COUNTED_BYTES):
            wanted = max(0, starts[-1][0] + size - at)
            while (end := block.find(b"\n", wanted) + 1) > 0:
                starts.append((at + end, lines + block.count(b"\n", 0, end)))
                wanted = end + size
            lines += block.count(b"\n")
            at += len(block)
    return parts_from(starts[:-1] if len(starts) > 1 and starts[-1][0] == at else starts)


def json_text(content: bytes, where: str, key: str) -> str:
    """The string that a key names in a JSON object; that of a null is empty.

    Raises:
        ValueError: it is no such object; the message begins with `where` and tells its keys.
    """
    try:
        # Not by a schema of pydantic's, which would not say where a surrogate is.
        record = _decode(content.removeprefix(codecs.BOM_UTF8).decode("utf-8", "surrogatepass"))
    except RecursionError:
        raise ValueError(f"{where}: not JSON that can be read, nested too deeply") from None
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ValueError(f"{where}: not UTF-8, {error.reason} 0x{byte:02x}") from None
    except json.JSONDecodeError as error:
        # A line has no lines; the member of a tar may have some.
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        place = f"{line}column {error.colno}"
        raise ValueError(f"{where}: not JSON, {one_line(error.msg)} at {place}") from None
    except ValueError as error:
        raise ValueError(f"{where}: not JSON, {one_line(error)}") from None
    if isinstance(record, list):
        raise ValueError(f"{where}: found a JSON array, wanted one object with `{key}` a line")
    path = path_of(record, key)
    if path is None:
        raise ValueError(
            f"{where}: no `{key}`, wanted an object with a string of that name, "
            f"{found_keys(record)}"
        )
    text = value_at(record, path)
    if not isinstance(text, str | None):
        raise ValueError(
            f"{where}: `{key}` is {_TYPES[type(text)]}, wanted a string; {found_keys(record)}"
        )
    if text is None:
        return ""
    check_characters(text, f"{where}: `{key}`")
    return text
