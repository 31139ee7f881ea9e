"""Prepare text: read the texts of files in units, and tokenize them as documents."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from longhaul.datamodules.files.atomic import write_atomically
from longhaul.datamodules.files.locks import lock
from longhaul.datamodules.files.untrusted import parse_json, read_regular
from longhaul.datamodules.manifest import Manifest
from longhaul.datamodules.preparation.documents import Document, Unit
from longhaul.datamodules.preparation.formats import Text, parts_of, texts_of
from longhaul.datamodules.preparation.packing import Packing
from longhaul.datamodules.preparation.resumable import Progress
from longhaul.datamodules.preparation.source_files import SourceFiles, files_in_validation
from longhaul.datamodules.preparation.text_files.keys import TEXT_KEY
from longhaul.datamodules.preparation.text_files.parts import WHOLE_FILE, FilePart
from longhaul.datamodules.preparation.units import Job, Part, prepare_units
from longhaul.datamodules.shards import Tokens
from longhaul.datamodules.tokenizer import Tokenizer

FEW_FILES = 100
"""Below this number of plain files, validation takes the end of each one, not whole files."""

UNIT_BYTES = 16 << 20
"""Bytes of files in a unit, about. A file that cannot be cut makes a larger one."""

# It changes when equal files and options give other tokens than before.
_VERSION = 1
_PARTS_NAME = "parts.json"
_MOST_PARTS_BYTES = 1 << 30


class _File(NamedTuple):
    """A file of a unit, or a part of one."""

    name: str
    path: Path
    part: FilePart
    is_validation: bool | None
    """Of a plain text that is not cut: whether it is for validation."""


@dataclass(frozen=True)
class TextUnit:
    """The texts of consecutive files, or of a part of one file."""

    files: tuple[_File, ...]
    tokenizer: Tokenizer
    cut_fraction: float
    """The share of each plain text, at its end, that is for validation; 0 cuts none."""
    text_key: str
    """As of SourceFiles."""

    @property
    def name(self) -> str:
        """Name of the first file."""
        return self.files[0].name

    def documents(self) -> Iterator[Document]:
        for name, path, part, is_validation in self.files:
            for text in texts_of(name, path, part, self.text_key):
                if text.is_file and self.cut_fraction:
                    for half in (False, True):
                        pieces = partial(_part_of, text, half, self.cut_fraction)
                        yield self._document(Text(text.name, pieces), half)
                else:
                    yield self._document(text, is_validation if text.is_file else None)

    def _document(self, text: Text, is_validation: bool | None) -> Document:
        return Document(text.name, partial(self._tokens_of, text), is_validation)

    def _tokens_of(self, text: Text) -> Iterator[Tokens]:
        for number, piece in enumerate(text.pieces()):
            try:
                tokens = self.tokenizer.encode(piece, goes_on=number > 0)
            except ValueError as error:
                raise ValueError(f"{text.name}: {error}") from None
            yield tokens  # type: ignore[misc]


def prepare_text(
    corpus: SourceFiles,
    destination: Path,
    tokenizer: Tokenizer,
    *,
    packing: Packing,
    docs_per_shard: int = 256,
    validation_fraction: float = 0.0,
    workers: int = 1,
    part: Part | None = None,
    tokenized: Progress = lambda tokens: None,
    packed: Progress = lambda tokens: None,
) -> list[Manifest]:
    """Write shards of a corpus into `destination`, or finish an interrupted preparation.

    With a validation fraction, they go into its subfolders `train` and `validation`. The hash of
    its name decides to which of them a record belongs, so adding records does not change the split
    of the others. Plain files are taken in the order of such hashes until they have the fraction of
    all bytes. Of fewer than FEW_FILES plain files, the end of each one is for validation instead:
    whole files might leave nothing for a part. Texts without a token are skipped. The tokens after
    the last whole block are dropped, since padding would repeat text. The manifest counts both.

    Returns:
        The manifest, or those of `train` and `validation`; none of a part.
    """
    cuts = cuts_files(corpus, validation_fraction)
    source = {
        "kind": "text",
        "corpus": corpus.description,
        "files": len(corpus.files),
        "files_sha256": corpus.fingerprint(),
    }
    if corpus.text_key != TEXT_KEY:
        source["text_key"] = corpus.text_key
    if cuts:
        source["validation_from"] = "the end of each file"
    job = Job(
        destination=destination,
        tokenizer=tokenizer,
        source=source,
        packing=packing,
        docs_per_shard=docs_per_shard,
        validation_fraction=validation_fraction,
        workers=workers,
        part=part,
        tokenized=tokenized,
        packed=packed,
    )
    return prepare_units(job, partial(text_units, corpus, job))


def cuts_files(corpus: SourceFiles, validation_fraction: float) -> bool:
    """Whether the end of each plain file is for validation, rather than whole files."""
    return validation_fraction > 0 and 0 < len(corpus.plain_files) < FEW_FILES


def text_units(corpus: SourceFiles, job: Job) -> dict[str, Unit]:
    """The units of a corpus by their keys, which depend on the names and sizes of their files."""
    fraction = job.validation_fraction
    cuts = cuts_files(corpus, fraction)
    plain = {name for name, _ in corpus.plain_files} if fraction and not cuts else set()
    chosen = files_in_validation(corpus, fraction) if plain else frozenset()
    parts = _parts(corpus, job.units_folder)
    units: dict[str, Unit] = {}
    files: list[_File] = []
    lines: list[list[Any]] = []
    filled = 0

    def close() -> None:
        nonlocal files, lines, filled
        if not files:
            return
        settings = [_VERSION, job.tokenizer.sha256, corpus.text_key, fraction, cuts, lines]
        key = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:32]
        # Files of equal names and sizes in two sources, in units of their own.
        while key in units:
            key = hashlib.sha256(key.encode()).hexdigest()[:32]
        cut_fraction = fraction if cuts else 0.0
        units[key] = TextUnit(tuple(files), job.tokenizer, cut_fraction, corpus.text_key)
        files, lines, filled = [], [], 0

    for name, path in corpus.files:
        size = path.stat().st_size
        if size > UNIT_BYTES:
            close()
        is_validation = name in chosen if name in plain else None
        for part in parts.get(str(path), [WHOLE_FILE]):
            files.append(_File(name, path, part, is_validation))
            lines.append([name, size, *part, is_validation])
            filled += size
            if filled >= UNIT_BYTES:
                close()
    close()
    return units


@dataclass(frozen=True)
class _KnownParts:
    """The file `parts.json`: the parts of large files, so that each start need not read these."""

    files_sha256: str
    parts: dict[str, list[tuple[int, int | None, int]]]


def _parts(corpus: SourceFiles, folder: Path) -> dict[str, list[FilePart]]:
    """The parts of large files, by path; one process finds them, and others wait for it."""
    large = [path for _, path in corpus.files if path.stat().st_size > UNIT_BYTES]
    if not large:
        return {}
    fingerprint = corpus.fingerprint()
    file = folder / _PARTS_NAME
    with (folder / f"{_PARTS_NAME}.lock").open("ab") as locked:
        lock(locked.fileno(), waits=True)
        if file.exists():
            known = parse_json(_KnownParts, read_regular(file, _MOST_PARTS_BYTES), file)
            if known.files_sha256 == fingerprint:
                return {
                    path: [FilePart(*part) for part in parts] for path, parts in known.parts.items()
                }
        parts = {str(path): parts_of(path, UNIT_BYTES) for path in large}
        write_atomically(file, json.dumps({"files_sha256": fingerprint, "parts": parts}))
    return parts


def _part_of(text: Text, is_validation: bool, fraction: float) -> Iterator[str]:
    """The last characters of a text for validation, the others for training."""
    characters = sum(map(len, text.pieces()))
    left = characters - round(characters * fraction)
    for piece in text.pieces():
        part = piece[left:] if is_validation else piece[:left]
        left = max(0, left - len(piece))
        if part:
            yield part
        if not is_validation and left == 0:
            return
