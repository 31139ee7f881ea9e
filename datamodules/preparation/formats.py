"""What a file of texts holds, and its texts: a plain text, JSON lines, or the rows of a table."""

import codecs
import io
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from longhaul.datamodules.files.untrusted import one_line, open_regular, shown
from longhaul.datamodules.native import foreign_content
from longhaul.datamodules.preparation.compression import (
    Compression,
    compression_of,
    opened,
    reading,
)
from longhaul.datamodules.tokenizer import check_characters

_log = logging.getLogger(__name__)
_with_replaced_bytes: set[Path] = set()

# Characters tokenized at a time. A tokenizer allocates some hundred times as much memory.
PIECE_CHARACTERS = 1 << 18
READABLE = (
    "plain text, JSON lines (.jsonl, .ndjson, .json) or .parquet; text and JSON lines may be "
    "compressed (.gz, .bz2, .xz, .zst, .lz4)"
)
_HEAD_BYTES = 8192
# A warning names so many files.
_MOST_NAMED = 5
_PARQUET_ROWS = 64
_COUNTED_BYTES = 1 << 20
# A compressed line may expand to any size.
_MOST_LINE_BYTES = 64 << 20
_LINES = (".jsonl", ".jsonlines", ".ndjson", ".json")
# Files that often hold texts, but whose bytes are no text.
_UNREAD = (
    *(".zip", ".7z", ".rar", ".tar", ".tgz", ".tbz2", ".txz", ".z", ".lzma", ".br", ".lzo"),
    *(".arrow", ".feather", ".ipc", ".orc", ".avro", ".warc", ".wet", ".sqlite", ".msgpack"),
)
# Longer ones first: that of UTF-32 begins with that of UTF-16.
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_TEXT_TYPES = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")
_BYTE_ORDER_MARK = "\ufeff"


class UnreadableError(ValueError):
    """The format of a file is none whose texts can be read."""


@dataclass(frozen=True)
class Text:
    """One text, read while iterating over its pieces."""

    name: str
    """Path of the file relative to its source, with `#` and a number in a file of records."""
    pieces: Callable[[], Iterator[str]]
    """The text in consecutive pieces of about `PIECE_CHARACTERS` at most."""
    is_file: bool = False
    """Whether it is a whole file, and not a record of one."""


@dataclass(frozen=True)
class Content:
    """What a file holds."""

    kind: Literal["text", "lines", "parquet"]
    compression: Compression | None
    encoding: str = "utf-8"
    """Of a text."""


def content_of(path: Path) -> Content:
    """What a file holds, by its name and first bytes.

    Raises:
        UnreadableError: it holds no texts, or holds them in a way that cannot be read.
        ValueError: it is damaged.
    """
    with open_regular(path) as file:
        head = file.read(_HEAD_BYTES)
    name = path.name.lower()
    packed = compression_of(name, head)
    if packed is not None:
        name = name.removesuffix(packed.ending)
        with opened(path, packed) as stream, reading(path):
            head = stream.read(_HEAD_BYTES)
        if (again := compression_of(name, head)) is not None:
            found = f"{again.name} in {packed.name}"
            raise UnreadableError(f"{path}: found {found}, wanted one of them")
    if name.endswith(_UNREAD):
        raise UnreadableError(
            f"{path}: found {Path(name).suffix}, whose texts cannot be read, wanted {READABLE}"
        )
    if name.endswith(".parquet") or (head.startswith(b"PAR1") and b"\0" in head):
        if packed is not None:
            found = f"parquet in {packed.name}"
            raise UnreadableError(f"{path}: found {found}, wanted .parquet itself")
        return Content("parquet", None)
    encoding = next((e for mark, e in _MARKS if head.startswith(mark)), "utf-8")
    if name.endswith(_LINES):
        if encoding != "utf-8":
            raise UnreadableError(f"{path}: found JSON lines in {encoding.upper()}, wanted UTF-8")
        _check_lines(path, name, head)
        return Content("lines", packed)
    if encoding == "utf-8" and b"\0" in head:
        raise UnreadableError(f"{path}: found a binary file, wanted {READABLE}")
    return Content("text", packed, encoding)


def _check_lines(path: Path, name: str, head: bytes) -> None:
    """Raise at a file called .json whose first line is not a whole object."""
    first = head.removeprefix(codecs.BOM_UTF8).lstrip()
    if not name.endswith(".json") or not first:
        return
    line, *_ = first.splitlines()
    if first.startswith(b"{") and (line.rstrip().endswith(b"}") or len(line) == len(first)):
        return
    if first.startswith(b"{"):
        found = "an object over several lines"
    else:
        found = "an array" if first.startswith(b"[") else "no object"
    raise UnreadableError(
        f"{path}: found {found}, wanted an object with `text` on each line; to read the file as "
        "plain text give it another ending"
    )


class FilePart(NamedTuple):
    """A part of a file of records: bytes of JSON lines, or row groups of a Parquet file."""

    start: int = 0
    stop: int | None = None
    """None: the end of the file."""
    before: int = 0
    """The number of lines or rows before it."""


WHOLE_FILE = FilePart()


def texts_of(name: str, path: Path, part: FilePart = WHOLE_FILE) -> Iterator[Text]:
    """The texts of a file, or of a part of it, whose name in the corpus is `name`."""
    content = content_of(path)
    if content.kind == "lines":
        yield from _json_lines(name, path, content.compression, part)
    elif content.kind == "parquet":
        yield from _parquet_rows(name, path, part)
    else:
        yield Text(name, partial(_plain_pieces, path, content), is_file=True)


def _plain_pieces(path: Path, content: Content) -> Iterator[str]:
    # Other encodings than UTF-8 are guessed from two bytes, which may be those of anything.
    errors = "replace" if content.encoding == "utf-8" else "strict"
    with opened(path, content.compression) as stream:
        file = io.TextIOWrapper(stream, content.encoding, errors, newline="")
        for piece in _cut_up(file, path):
            if errors == "replace" and "\ufffd" in piece:
                _warn_of_replaced_bytes(path)
            yield piece


def _warn_of_replaced_bytes(path: Path) -> None:
    """Once a file, and by name of the first few alone: a corpus may be in Latin-1 as a whole."""
    if path in _with_replaced_bytes:
        return
    _with_replaced_bytes.add(path)
    if len(_with_replaced_bytes) <= _MOST_NAMED:
        _log.warning("%s: found U+FFFD, which bytes that are not UTF-8 become", path)
    elif len(_with_replaced_bytes) == _MOST_NAMED + 1:
        _log.warning("more files have U+FFFD; they are not named")


def parts_of(path: Path, size: int) -> list[FilePart]:
    """The parts of a file in order: each has about `size` bytes, and begins with a record.

    A file that can only be read as a whole is one part: a plain text, and what is compressed.
    """
    content = content_of(path)
    if content.kind == "text" or content.compression or path.stat().st_size <= size:
        return [WHOLE_FILE]
    starts = _line_starts(path, size) if content.kind == "lines" else _group_starts(path, size)
    stops = [start for start, _ in starts[1:]]
    return [
        FilePart(start, stop, before)
        for (start, before), stop in zip(starts, [*stops, None], strict=True)
    ]


def _line_starts(path: Path, size: int) -> list[tuple[int, int]]:
    """The byte at which each part starts, and the number of lines before. Reads the whole file."""
    starts = [(0, 0)]
    at = lines = 0
    with open_regular(path) as file:
        while block := file.read(min(size, _COUNTED_BYTES)):
            wanted = starts[-1][0] + size - at
            if wanted < len(block) and (end := block.find(b"\n", max(0, wanted))) >= 0:
                starts.append((at + end + 1, lines + block.count(b"\n", 0, end + 1)))
            lines += block.count(b"\n")
            at += len(block)
    return starts if starts[-1][0] < at else starts[:-1]


def _group_starts(path: Path, size: int) -> list[tuple[int, int]]:
    """The row group with which each part starts, and the number of rows before."""
    import pyarrow.parquet

    with foreign_content(path, "not readable as parquet"):
        metadata = pyarrow.parquet.read_metadata(path)
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        sizes = [(group.total_byte_size, group.num_rows) for group in groups]
    starts = [(0, 0)]
    total = rows = 0
    for number, (bytes_here, rows_here) in enumerate(sizes):
        if total >= size:
            starts.append((number, rows))
            total = 0
        total += bytes_here
        rows += rows_here
    return starts


def _json_lines(
    name: str, path: Path, compression: Compression | None, part: FilePart
) -> Iterator[Text]:
    with opened(path, compression) as file:
        if part.start:
            file.seek(part.start)
        at, number = part.start, part.before
        while (part.stop is None or at < part.stop) and (line := _next_line(file, path)):
            at += len(line)
            number += 1
            where = f"{path}:{number}"
            if len(line) > _MOST_LINE_BYTES:
                raise ValueError(
                    f"{where}: found a line of more than {_MOST_LINE_BYTES >> 20} MiB, wanted "
                    "shorter texts"
                )
            if line.strip():
                # Read even if this line is for the other split: the first bad one is to be named.
                text = _json_text(line, where)
                yield Text(f"{name}#{number}", partial(_pieces_of, text, path))


def _next_line(file: IO[bytes], path: Path) -> bytes:
    with reading(path):
        return file.readline(_MOST_LINE_BYTES + 1)


def _json_text(line: bytes, where: str) -> str:
    try:
        # Not by a schema of pydantic's, which would not say where a surrogate is.
        record = json.loads(line)
    except RecursionError:
        raise ValueError(f"{where}: not JSON that can be read, nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{where}: not JSON, {one_line(error)}") from None
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise ValueError(f"{where}: no `text`, wanted an object with a string of that name")
    check_characters(text, f"{where}: `text`")
    return text


def _parquet_rows(name: str, path: Path, part: FilePart) -> Iterator[Text]:
    # Imported here, because it is slow and only parquet files need it.
    import pyarrow.parquet

    unreadable = "not readable as parquet"
    with foreign_content(path, unreadable):
        file = pyarrow.parquet.ParquetFile(path, pre_buffer=False)
        schema = file.schema_arrow
    with file:
        if schema.names.count("text") != 1:
            raise ValueError(f"{path}: columns {shown(schema.names)}, wanted a `text`, once")
        if not _is_text(schema.field("text").type):
            kind = one_line(schema.field("text").type)
            raise ValueError(f"{path}: column `text` is {kind}, wanted strings or bytes of UTF-8")
        groups = list(range(file.num_row_groups))[part.start : part.stop]
        batches = file.iter_batches(
            _PARQUET_ROWS, row_groups=groups, columns=["text"], use_threads=False
        )
        number = part.before
        while True:
            with foreign_content(path, unreadable):
                batch = next(batches, None)
            if batch is None:
                return
            for value in batch.column(0):
                number += 1
                with foreign_content(f"{path}: row {number}", "no text in UTF-8"):
                    text = value.as_py()
                    text = text.decode() if isinstance(text, bytes) else text
                yield Text(f"{name}#{number}", partial(_pieces_of, text or "", path))


def _is_text(kind: Any) -> bool:
    """Whether a column of this type of Arrow's holds strings, or bytes, each once or repeated."""
    from pyarrow import types

    while types.is_dictionary(kind):
        kind = kind.value_type
    return str(kind) in _TEXT_TYPES


def _pieces_of(text: str, path: Path) -> Iterator[str]:
    return _cut_up(io.StringIO(text, newline=""), path)


def _cut_up(file: IO[str], path: Path) -> Iterator[str]:
    """The text in pieces, cut only where no tokenizer would merge across the cut.

    A byte order mark at the beginning is no part of the text. Line ends stay as they are.
    """
    text = ""
    is_first = True
    while block := _next_block(file, path):
        text += block.removeprefix(_BYTE_ORDER_MARK) if is_first else block
        is_first = False
        if len(text) >= PIECE_CHARACTERS:
            cut = _place_to_cut(text)
            yield text[:cut]
            text = text[cut:]
    if text:
        yield text


def _next_block(file: IO[str], path: Path) -> str:
    with reading(path):
        return file.read(PIECE_CHARACTERS)


def _place_to_cut(text: str) -> int:
    """Index of the last space without other white space next to it, or the end if it is far off.

    Byte-pair tokenizers split there before they merge, since a word includes the space before it.
    """
    at = text.rfind(" ", 0, len(text) - 1)
    while at > len(text) // 2:
        if not text[at - 1].isspace() and not text[at + 1].isspace():
            return at
        at = text.rfind(" ", 0, at)
    return len(text)
