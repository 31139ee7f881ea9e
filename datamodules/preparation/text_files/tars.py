"""The texts of tars as webdataset writes them: one a sample, its `.txt` or a string of its `.json`.

A sample is a run of files with one key, which is the path up to the first dot after the last slash;
what is behind that dot is the ending. Folders, links, files without a dot or with one in front,
and files that webdataset skips (`__name__`) are skipped.
"""

import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

from longhaul.datamodules.files.untrusted import one_line, shown
from longhaul.datamodules.native import foreign_content
from longhaul.datamodules.preparation.archives import files_in
from longhaul.datamodules.preparation.text_files.json_lines import MOST_TEXT_BYTES, json_text
from longhaul.datamodules.preparation.text_files.keys import TEXT_KEY

_PLAIN, _JSON = ("txt",), ("json", "jsn")
_PICKLES = ("pkl", "pickle", "pyd")
_NAME = re.compile(r"(?P<key>(?:.*/)?[^/.]+)\.(?P<ending>[^/]+)", re.DOTALL)
_SKIPPED = re.compile(r"__[^/]*__($|/)")
_BLOCK_BYTES = 512
_MOST_NAMED = 12


class _Sample(NamedTuple):
    key: str
    contents: dict[str, bytes | None]
    """By ending; those that cannot be texts are None, and not read."""


def is_tar(head: bytes) -> bool:
    """Whether these first bytes, or more, are those of a tar with something in it."""
    try:
        tarfile.TarInfo.frombuf(head[:_BLOCK_BYTES], "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return False
    return True


def no_texts_in(file: IO[bytes], path: Path) -> str | None:
    """What the first sample has instead of a text, None if it has one.

    Raises ValueError where the archive is damaged.
    """
    sample = next(_samples(file, path), None)
    if sample is None:
        return "found a tar without samples"
    return None if {*_PLAIN, *_JSON} & {*sample.contents} else _found(sample)


def tar_texts(file: IO[bytes], path: Path, key: str) -> Iterator[tuple[int, str]]:
    """Numbers of samples, from 1, and their texts.

    The key `text` is a sample's `.txt`, if it has one. That, or any other, is looked for in its
    `.json` or `.jsn`.

    Raises:
        ValueError: the archive is damaged, or a sample has no text; it is named.
    """
    for number, sample in enumerate(_samples(file, path), 1):
        where = f"{path}: sample {number} ({shown(sample.key)})"
        plain = next(
            (sample.contents[ending] for ending in _PLAIN if ending in sample.contents), None
        )
        record = next((sample.contents[each] for each in _JSON if each in sample.contents), None)
        if key == TEXT_KEY and plain is not None:
            with foreign_content(where, "no text in UTF-8"):
                text = plain.decode()
        elif record is not None:
            text = json_text(record, where, key)
        else:
            txt = ".txt and no " if key == TEXT_KEY else ""
            raise ValueError(f"{where}: no {txt}.json with `{key}`, {_found(sample)}")
        yield number, text


def _found(sample: _Sample) -> str:
    if pickles := [each for each in sample.contents if each.endswith(_PICKLES)]:
        return f"found a pickle (.{shown(pickles[0])[1:-1]}), which is not read: it may run code"
    names = [f".{shown(each)[1:-1]}" for each in sample.contents]
    return one_line(f"found {', '.join(names[:_MOST_NAMED])}")


def _samples(file: IO[bytes], path: Path) -> Iterator[_Sample]:
    sample: _Sample | None = None
    for name, read in files_in(file, path):
        parts = _NAME.fullmatch(name)
        if parts is None or _SKIPPED.match(name):
            continue
        key, ending = parts["key"], parts["ending"].lower()
        if sample is None or sample.key != key:
            if sample is not None:
                yield sample
            sample = _Sample(key, {})
        if ending in sample.contents:
            raise ValueError(f"{path}: found {shown(name)} twice, wanted it once a sample")
        sample.contents[ending] = read(MOST_TEXT_BYTES) if ending in (*_PLAIN, *_JSON) else None
    if sample is not None:
        yield sample
