"""What a file of texts holds, and its texts: one plain text, or a text of each of many records."""

import codecs
import io
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Literal, TypeAlias

from longhaul.datamodules.files.untrusted import open_regular
from longhaul.datamodules.preparation.compression import (
    COMPRESSIONS,
    Compression,
    compression_of,
    head_of,
    opened,
    reading,
)
from longhaul.datamodules.preparation.text_files.json_lines import (
    is_json_lines,
    json_texts,
    parts_of_lines,
)
from longhaul.datamodules.preparation.text_files.keys import TEXT_KEY
from longhaul.datamodules.preparation.text_files.parts import WHOLE_FILE, FilePart
from longhaul.datamodules.preparation.text_files.tables import (
    arrow_texts,
    is_arrow,
    is_parquet,
    parquet_texts,
    parts_of_arrow,
    parts_of_parquet,
)
from longhaul.datamodules.preparation.text_files.tars import is_tar, no_texts_in, tar_texts

Kind: TypeAlias = Literal["text", "lines", "parquet", "arrow", "tar"]

_log = logging.getLogger(__name__)
_with_replaced_bytes: set[Path] = set()

# Characters tokenized at a time. A tokenizer allocates some hundred times as much memory.
PIECE_CHARACTERS = 1 << 18
READABLE = (
    "plain text, JSON lines (.jsonl, .ndjson, .json), .parquet, .arrow or a webdataset's .tar; but "
    "for .parquet and .arrow they may be compressed (.gz, .bz2, .xz, .zst, .lz4)"
)
_HEAD_BYTES = 8192
# A warning names so many files.
_MOST_NAMED = 5
_LINES = (".jsonl", ".jsonlines", ".ndjson", ".json")
_TARS = (".tar", ".tgz", ".tbz2", ".txz")
_TABLES: dict[Kind, tuple[tuple[str, ...], Callable[[bytes], bool]]] = {
    "parquet": ((".parquet",), is_parquet),
    "arrow": ((".arrow", ".arrows", ".feather", ".ipc"), is_arrow),
}
_NO_PAGES = (
    *(*_LINES, *_TARS, *(ending for endings, _ in _TABLES.values() for ending in endings)),
    *(each.ending for each in COMPRESSIONS),
)
# Files that often hold texts, but whose bytes are no text.
_UNREAD = (
    *(".zip", ".7z", ".rar", ".z", ".lzma", ".br", ".lzo"),
    *(".orc", ".avro", ".warc", ".wet", ".sqlite", ".msgpack", ".pkl", ".pickle"),
)
_ZIP_MAGIC = b"PK\3\4"
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_PAGES = (b"<!doctype html", b"<html")
# Longer ones first: that of UTF-32 begins with that of UTF-16.
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
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

    kind: Kind
    compression: Compression | None
    encoding: str = "utf-8"
    """Of a text."""


def content_of(path: Path) -> Content:
    """What a file holds, by its first bytes.

    A name that promises another format than they show is that of a damaged file. It decides only
    what bytes cannot tell: whether a file of one JSON object is a record or a text.

    Raises:
        UnreadableError: it holds no texts, or holds them in a way that cannot be read.
        ValueError: it is damaged, or no download of the file but a page or a pointer.
    """
    with open_regular(path) as file:
        head = head_of(file, _HEAD_BYTES)
    name = path.name.lower()
    _check_downloaded(path, name, head)
    packed = compression_of(name, head)
    if packed is not None:
        if not head:
            raise ValueError(f"{path}: damaged, found no bytes, wanted {packed.name}")
        name = name.removesuffix(packed.ending)
        with opened(path, packed) as stream, reading(path):
            head = stream.read(_HEAD_BYTES)
        if (again := compression_of(name, head)) is not None:
            found = f"{again.name} in {packed.name}"
            raise UnreadableError(f"{path}: found {found}, wanted one of them")
    ending = ".zip" if head.startswith(_ZIP_MAGIC) else Path(name).suffix
    if ending in _UNREAD:
        raise UnreadableError(
            f"{path}: found {ending}, whose texts cannot be read, wanted {READABLE}"
        )
    for kind, (endings, is_kind) in _TABLES.items():
        if ending not in endings and not is_kind(head):
            continue
        if packed is not None:
            found = f"{kind} in {packed.name}"
            raise UnreadableError(f"{path}: found {found}, wanted {endings[0]} itself")
        if not is_kind(head):
            raise ValueError(f"{path}: not readable as {kind}, found no header of such a file")
        return Content(kind, None)
    if is_tar(head):
        with opened(path, packed) as stream:
            found_instead = no_texts_in(stream, path)
        if found_instead is not None:
            wanted = "a .txt or a .json a sample"
            raise UnreadableError(f"{path}: {found_instead}, wanted {wanted} (webdataset)")
        return Content("tar", packed)
    if ending in _TARS:
        raise ValueError(f"{path}: damaged, found no header of a tar")
    return _text_or_lines(path, name, head, packed)


def _check_downloaded(path: Path, name: str, head: bytes) -> None:
    """Raise at what is left where a download went wrong."""
    if head.startswith(_LFS_POINTER):
        raise ValueError(
            f"{path}: found a git-LFS pointer, wanted the file itself; `git lfs pull` fetches it"
        )
    is_page = head.removeprefix(codecs.BOM_UTF8).lstrip()[:14].lower().startswith(_PAGES)
    if is_page and name.endswith(_NO_PAGES):
        raise ValueError(f"{path}: found an HTML page, wanted what its name says; fetch it again")


def _text_or_lines(path: Path, name: str, head: bytes, packed: Compression | None) -> Content:
    encoding = next((e for mark, e in _MARKS if head.startswith(mark)), "utf-8")
    if name.endswith(_LINES):
        if encoding != "utf-8":
            raise UnreadableError(f"{path}: found JSON lines in {encoding.upper()}, wanted UTF-8")
        _check_lines(path, name, head)
        return Content("lines", packed)
    if encoding == "utf-8" and b"\0" in head:
        raise UnreadableError(f"{path}: found a binary file, wanted {READABLE}")
    if encoding == "utf-8" and head.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"{"):
        with opened(path, packed) as stream:
            if is_json_lines(stream, path):
                return Content("lines", packed)
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
        found = "a JSON array" if first.startswith(b"[") else "no object"
    raise UnreadableError(
        f"{path}: found {found}, wanted an object on each line; to read the file as "
        "plain text give it another ending"
    )


def texts_of(
    name: str, path: Path, part: FilePart = WHOLE_FILE, text_key: str = TEXT_KEY
) -> Iterator[Text]:
    """The texts of a file, or of a part of it, whose name in the corpus is `name`.

    Args:
        part: one of `parts_of`.
        text_key: what the texts are called in files of records: a name, or a path with dots. That
            of a null is empty.

    Raises:
        ValueError: with the file, and the record where one is damaged or has no text.
    """
    content = content_of(path)
    if content.kind == "text":
        yield Text(name, partial(_plain_pieces, path, content), is_file=True)
        return
    # Each is read even if it is for the other split: the first bad one is to be named.
    for number, text in _records(path, content, part, text_key):
        yield Text(f"{name}#{number}", partial(_pieces_of, text, path))


def _records(path: Path, content: Content, part: FilePart, key: str) -> Iterator[tuple[int, str]]:
    if content.kind == "parquet":
        yield from parquet_texts(path, key, part)
    elif content.kind == "arrow":
        yield from arrow_texts(path, key, part)
    else:
        with opened(path, content.compression) as file:
            if content.kind == "lines":
                yield from json_texts(file, path, key, part)
            else:
                yield from tar_texts(file, path, key)


def parts_of(path: Path, size: int) -> list[FilePart]:
    """The parts of a file in order: each has about `size` bytes, and begins with a record.

    JSON lines are cut behind a line, Parquet between row groups, Arrow between record batches. A
    file that can only be read as a whole is one part: a plain text, a tar, what is compressed.
    """
    content = content_of(path)
    if content.compression or path.stat().st_size <= size:
        return [WHOLE_FILE]
    if content.kind == "lines":
        return parts_of_lines(path, size)
    if content.kind == "parquet":
        return parts_of_parquet(path, size)
    if content.kind == "arrow":
        return parts_of_arrow(path, size)
    return [WHOLE_FILE]


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
        _log.warning("%s: found bytes that are not UTF-8; U+FFFD stands for them in the text", path)
    elif len(_with_replaced_bytes) == _MOST_NAMED + 1:
        _log.warning("more files have such bytes; they are not named")


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
