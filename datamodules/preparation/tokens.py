"""Prepare files of tokens that other programs wrote: find their documents, and pack these."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

from longhaul.datamodules.manifest import Manifest
from longhaul.datamodules.preparation.documents import Document, Unit
from longhaul.datamodules.preparation.packing import Packing
from longhaul.datamodules.preparation.resumable import Progress
from longhaul.datamodules.preparation.token_files.ids import Vocabulary
from longhaul.datamodules.preparation.token_files.recognition import Options, recognise
from longhaul.datamodules.preparation.token_files.separators import Found, find_separator
from longhaul.datamodules.preparation.token_files.sources import (
    Items,
    ItemsUnit,
    Separator,
    StoredItems,
    Stream,
    StreamUnit,
)
from longhaul.datamodules.preparation.token_files.stored import Joined
from longhaul.datamodules.preparation.units import Job, Part, prepare_units
from longhaul.datamodules.tokenizer import Tokenizer

# It changes when equal files and options give other documents than before.
_VERSION = 1

UNIT_TOKENS = 1 << 26
"""Tokens of a unit, about. Files of MDS, LitData, tables and tars are one unit each."""


@dataclass(frozen=True)
class TokenFiles:
    """Files of tokens of one format, and how they are read."""

    format: str
    found: Found
    """Where separators stand."""
    units: tuple[Unit, ...]
    fingerprint: str
    """Hash of the names and sizes of all files."""
    files: int
    raw: str | None
    column: str | None

    def documents(self) -> Iterator[Document]:
        """All documents, without separators. ValueError at an id that the tokenizer lacks."""
        for unit in self.units:
            yield from unit.documents()


def open_token_files(
    sources: Sequence[Path],
    tokenizer: Tokenizer,
    *,
    raw: str | None = None,
    column: str | None = None,
    separator: Separator | None = None,
) -> TokenFiles:
    """The files of tokens in these files and folders, in the order of their names.

    Args:
        raw: the type of tokens, of RAW_TYPES, in files that do not say it.
        column: the column of tokens in tables and MDS, or the ending of members of a tar.
        separator: where an id stands that begins or ends a text; None: the files tell.

    Raises:
        ValueError: in one line, what is damaged or not known.
    """
    vocabulary = Vocabulary(tokenizer)
    kind, parts = recognise(sources, Options(vocabulary, raw, column))
    found = find_separator(parts, vocabulary, separator)
    files = [(part.name, path) for part in parts for path in part.files]
    lines = [f"{name}\0{path.name}\0{path.stat().st_size}\n" for name, path in files]
    return TokenFiles(
        kind,
        found,
        tuple(_units(parts, vocabulary, found.separator)),
        hashlib.sha256("".join(lines).encode(errors="surrogateescape")).hexdigest(),
        len(files),
        raw,
        column,
    )


def _units(
    sources: Sequence[Items | Stream], vocabulary: Vocabulary, separator: Separator
) -> Iterator[Unit]:
    run: list[Stream] = []
    for source in sources:
        if isinstance(source, StoredItems):
            count = max(1, source.stored.tokens // UNIT_TOKENS)
            bounds = [source.documents * number // count for number in range(count + 1)]
            for part in pairwise(bounds):
                yield ItemsUnit(source.name, source, vocabulary, separator, part)
            continue
        if isinstance(source, Items):
            yield ItemsUnit(source.name, source, vocabulary, separator)
            continue
        last = run[-1] if run else None
        if (
            last is None
            or source.number is None
            or (last.group, last.number) != (source.group, source.number - 1)
        ):
            yield from _of_run(run, vocabulary, separator)
            run = []
        run.append(source)
    yield from _of_run(run, vocabulary, separator)


def _of_run(run: Sequence[Stream], vocabulary: Vocabulary, separator: Separator) -> Iterator[Unit]:
    files = [[part for one in file.stored for part in one.cut(UNIT_TOKENS)] for file in run]
    stream = Joined(tuple(part for parts in files for part in parts))
    origin = 0
    for file, parts in zip(run, files, strict=True):
        end = origin + len(parts)
        first = after = origin
        while after < end:
            tokens = 0
            # One text cannot be divided. Blocks of our own shards are small parts.
            while after < end and (separator == "none" or tokens < UNIT_TOKENS):
                tokens += stream.parts[after].tokens
                after += 1
            yield StreamUnit(file.name, stream, (first, after), origin, vocabulary, separator)
            first = after
        origin = end


def prepare_tokens(
    files: TokenFiles,
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
    """Write shards of the documents, as `prepare_text` does with those of texts.

    Of documents, the hash of their names decides which are for validation; of one that is a whole
    file it is the end.
    """
    job = Job(
        destination=destination,
        tokenizer=tokenizer,
        source={
            "kind": "tokens",
            "format": files.format,
            "files": files.files,
            "files_sha256": files.fingerprint,
            "raw": files.raw,
            "column": files.column,
            "separator": files.found.separator,
            "separator_from": files.found.reason,
        },
        packing=packing,
        docs_per_shard=docs_per_shard,
        validation_fraction=validation_fraction,
        workers=workers,
        part=part,
        tokenized=tokenized,
        packed=packed,
    )
    return prepare_units(job, partial(_units_of, files, job))


def _units_of(files: TokenFiles, job: Job) -> dict[str, Unit]:
    """The units by their keys, which depend on the names and sizes of all files."""
    options = (job.tokenizer.sha256, files.fingerprint, files.raw, files.column)
    settings = (_VERSION, UNIT_TOKENS, *options, files.found.separator, job.validation_fraction)
    units: dict[str, Unit] = {}
    for number, unit in enumerate(files.units):
        if isinstance(unit, StreamUnit):
            unit = replace(unit, validation_fraction=job.validation_fraction)
        key = repr((*settings, number))
        units[hashlib.sha256(key.encode()).hexdigest()[:32]] = unit
    return units
