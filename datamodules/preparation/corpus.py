"""Read texts from files (plain text, .jsonl, .jsonl.gz, parquet) as streams in a fixed order."""

import gzip
import hashlib
import io
import json
import logging
import os
import sysconfig
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from longhaul.datamodules.untrusted import check_regular, one_line, open_regular, shown
from longhaul.datamodules.urls import MissingInputError

_log = logging.getLogger(__name__)

# Characters tokenized at a time. A tokenizer allocates some hundred times as much memory.
PIECE_CHARACTERS = 1 << 18
_SNIFF_BYTES = 8192
_PARQUET_ROWS = 64
# A compressed line may expand to any size.
_MOST_LINE_BYTES = 64 << 20
# Names of files with many records, each of which is a text.
_RECORDS = (".jsonl", ".jsonl.gz", ".parquet")


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
class Corpus:
    """A list of files in the order in which they are read, sorted by the hash of their names.

    Neighbouring files in a folder are similar. Sorted by hash, every stretch of the corpus is a
    mixture.
    """

    description: str
    """Description of the files, for the manifest."""
    files: tuple[tuple[str, Path], ...]
    """Names, relative to the source, and paths."""

    def fingerprint(self) -> str:
        """Hash of the names and sizes of all files."""
        lines = [f"{name}\0{path.stat().st_size}\n" for name, path in self.files]
        return hashlib.sha256("".join(lines).encode(errors="surrogateescape")).hexdigest()

    @property
    def plain_files(self) -> int:
        """Number of files that are one text each."""
        return sum(not path.name.endswith(_RECORDS) for _, path in self.files)

    def texts(self) -> Iterator[Text]:
        """All texts. A plain text file is one text; in other files every record is one text."""
        for name, path in self.files:
            yield from _texts_of(name, path)


def open_corpus(sources: list[str]) -> Corpus:
    """The files in these sources, which are files or folders; none is Python's standard library."""
    if not sources:
        return _standard_library()
    found: list[tuple[str, Path]] = []
    binary = special = 0
    for source in map(Path, sources):
        if source.is_dir():
            for path in _walk(source):
                if not path.is_file():
                    special += 1
                elif _is_binary(path):
                    binary += 1
                else:
                    found.append((path.relative_to(source).as_posix(), path))
        elif not source.exists():
            raise MissingInputError(f"{source}: no such file or folder")
        else:
            check_regular(source)
            if _is_binary(source):
                raise ValueError(f"{source}: found a binary file, wanted text, .jsonl or .parquet")
            found.append((source.name, source))
    if binary:
        _log.warning("%d binary files in the folders are left out", binary)
    if special:
        _log.warning("%d links to nothing, FIFOs, sockets and devices are left out", special)
    if not found:
        raise ValueError(f"{', '.join(sources)}: no text in it")
    return Corpus("files", _ordered(_each_once(found)))


def _each_once(files: list[tuple[str, Path]]) -> list[tuple[str, Path]]:
    """The files without links to files that are there too."""
    by_target: dict[str, tuple[str, Path]] = {}
    # A file goes before links to it, and these by name, whatever the order of the folder.
    for name, path in sorted(files, key=lambda item: (item[1].is_symlink(), item[0], str(item[1]))):
        by_target.setdefault(os.path.realpath(path), (name, path))
    if repeated := len(files) - len(by_target):
        _log.warning("%d links to files that are read anyway are left out", repeated)
    return list(by_target.values())


def _standard_library() -> Corpus:
    root = Path(sysconfig.get_path("stdlib"))
    foreign = {"site-packages", "dist-packages"}
    found = [
        (path.relative_to(root).as_posix(), path)
        for path in _walk(root)
        if path.suffix == ".py" and not foreign & set(path.relative_to(root).parts)
    ]
    if not found:
        raise ValueError(f"{root}: Python's standard library has no sources here; name a source")
    return Corpus("the Python standard library", _ordered(found))


def _ordered(files: list[tuple[str, Path]]) -> tuple[tuple[str, Path], ...]:
    return tuple(sorted(files, key=lambda item: (_digest(item[0]), str(item[1]))))


def _digest(name: str) -> bytes:
    return hashlib.sha256(name.encode(errors="surrogateescape")).digest()


def in_validation(name: str, fraction: float) -> bool:
    """Whether the text of this name belongs to the validation fraction, by the name's hash."""
    # Other bytes of the hash than those that decide the order: else validation would come first.
    return int.from_bytes(_digest(name)[-8:], "big") < fraction * 2**64


def _walk(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name[0] != "." and name != "__pycache__"]
        yield from (Path(parent, name) for name in names if name[0] != ".")


def _is_binary(path: Path) -> bool:
    if path.name.endswith((".jsonl.gz", ".parquet")):
        return False
    with open_regular(path) as file:
        return b"\0" in file.read(_SNIFF_BYTES)


def _texts_of(name: str, path: Path) -> Iterator[Text]:
    if path.name.endswith(".jsonl"):
        with path.open("rb") as file:
            yield from _json_lines(name, path, file)
    elif path.name.endswith(".jsonl.gz"):
        with gzip.open(path, "rb") as packed:
            yield from _json_lines(name, path, packed)
    elif path.name.endswith(".parquet"):
        yield from _parquet_rows(name, path)
    else:
        yield Text(name, partial(_plain_pieces, path), is_file=True)


def _plain_pieces(path: Path) -> Iterator[str]:
    with path.open("r", encoding="utf-8", errors="replace", newline="") as file:
        yield from _cut_up(file)


def _json_lines(name: str, path: Path, file: IO[bytes] | gzip.GzipFile) -> Iterator[Text]:
    number = 0
    try:
        while line := file.readline(_MOST_LINE_BYTES + 1):
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
                yield Text(f"{name}#{number}", partial(_pieces_of, text))
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: damaged, {one_line(error)}") from None


def _json_text(line: bytes, where: str) -> str:
    try:
        # Not by a schema of pydantic's, which refuses single surrogates; crawled text has some.
        record = json.loads(line)
    except RecursionError:
        raise ValueError(f"{where}: not JSON that can be read, nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{where}: not JSON, {one_line(error)}") from None
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise ValueError(f"{where}: no `text`, wanted an object with a string of that name")
    return text


def _parquet_rows(name: str, path: Path) -> Iterator[Text]:
    # Imported here, because it is slow and only parquet files need it.
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path, pre_buffer=False) as file:
            schema = file.schema_arrow
            kinds = (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view())
            if "text" not in schema.names or schema.field("text").type not in kinds:
                names = shown(schema.names)
                raise ValueError(f"{path}: columns {names}, wanted a `text` of strings")
            number = 0
            for batch in file.iter_batches(_PARQUET_ROWS, columns=["text"], use_threads=False):
                for value in batch.column(0):
                    number += 1
                    if (text := value.as_py()) is not None:
                        yield Text(f"{name}#{number}", partial(_pieces_of, text))
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        # Arrow reports damage as an OSError too, but one without a number.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise ValueError(f"{path}: not readable as parquet, {one_line(error)}") from None


def _pieces_of(text: str) -> Iterator[str]:
    return _cut_up(io.StringIO(text, newline=""))


def _cut_up(file: IO[str]) -> Iterator[str]:
    """The text in pieces, cut only where no tokenizer would merge across the cut."""
    text = ""
    while block := file.read(PIECE_CHARACTERS):
        text += block
        if len(text) >= PIECE_CHARACTERS:
            cut = _place_to_cut(text)
            yield text[:cut]
            text = text[cut:]
    if text:
        yield text


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
