"""Write blocks as shards and a manifest. A stopped preparation resumes at its last shard."""

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, Protocol, TypeAlias

from longhaul.datamodules.files.atomic import naming_the_full, write_atomically
from longhaul.datamodules.files.locks import lock
from longhaul.datamodules.files.untrusted import Count, check_no_links, one_line, parse_json, shown
from longhaul.datamodules.manifest import MANIFEST_NAME, Manifest, ShardEntry, load_manifest
from longhaul.datamodules.preparation.text_files.keys import TEXT_KEY
from longhaul.datamodules.shards import Block, new_shard

PROGRESS_NAME = ".progress.jsonl"
UNITS_NAME = ".units"
"""The folder of unit files, in the destination of a preparation."""

# How users give what identifies a preparation.
_OPTIONS = {
    "docs_per_shard": "--docs-per-shard",
    "document_tokens": "--doc-tokens",
    "files": "files of SRC in number",
    "files_sha256": "files of SRC (files_sha256)",
    "long": "--long",
    "max_tokens": "--max-tokens",
    "min_tokens": "--min-tokens",
    "packing": "--packing",
    "text_key": "--text-key",
    "tokenizer_sha256": "--tokenizer (tokenizer_sha256)",
    "validation_fraction": "--validation-fraction",
}
# What holds where the option is not recorded.
_UNSAID = {"text_key": TEXT_KEY}

Cursor: TypeAlias = list[int]
Progress: TypeAlias = Callable[[int], None]


@dataclass(frozen=True)
class _Settings:
    """The first line of `.progress.jsonl`."""

    source: dict[str, Any]
    version: int = 1
    """Of the class of the source."""


@dataclass(frozen=True)
class _FinishedShard:
    """Each further line: a shard, and where the source goes on after it."""

    shard: ShardEntry
    cursor: list[Count]


class BlockSource(Protocol):
    """Blocks of tokens in a fixed order, from any cursor on."""

    version: int
    """It changes when equal options give other blocks than before."""

    def blocks(self, cursor: Cursor | None) -> Iterator[tuple[Block, Cursor]]:
        """Blocks after `cursor` (None: from the start), each with the cursor after it."""
        ...


def prepare_shards(
    folder: Path,
    template: Manifest,
    source: BlockSource,
    *,
    docs_per_shard: int,
    prefix: str,
    progress: Progress,
    extra_files: Mapping[str, bytes] | None = None,
) -> Manifest:
    """Write the blocks of `source` and their manifest into `folder`, or resume doing so.

    A shard is written under a temporary name, read back, recorded in `.progress.jsonl`, and then
    renamed. A restart keeps every renamed shard and continues at the cursor recorded with the last.

    Args:
        folder: empty, new, or left by a stopped preparation with the same `template.source`. The
            units of text that is prepared may be in it.
        template: the manifest without its shards.
        source: it has one block at least.
        prefix: shards are called `PREFIX-000000.tar` and so on.
        progress: called with the number of tokens written so far, earlier starts included.
        extra_files: other files to write into the folder, by name.
    """
    if docs_per_shard < 1:
        raise ValueError(f"--docs-per-shard: found {docs_per_shard}, wanted 1 or more")
    finished = finished_manifest(folder, template)
    if finished is not None:
        progress(finished.num_tokens)
        return finished
    check_destination(folder, {PROGRESS_NAME, UNITS_NAME})
    check_no_links(folder)
    folder.mkdir(parents=True, exist_ok=True)
    progress_file = folder / PROGRESS_NAME
    with naming_the_full(progress_file), progress_file.open("a+b") as file:
        if not lock(file.fileno()):
            raise ValueError(f"{folder}: another preparation is writing into it")
        shards, cursor = _read_progress(file, folder, template, source.version)
        for leftover in folder.glob(".*.tmp"):
            leftover.unlink()
        blocks = source.blocks(cursor)
        done = sum(shard.documents for shard in shards)
        progress(done * template.document_tokens)

        def counted(pairs: Iterable[tuple[Block, Cursor]]) -> Iterator[Block]:
            """The blocks; each one that is written is counted, and the cursor after it kept."""
            nonlocal cursor, done
            for block, after in pairs:
                cursor = after
                yield block
                done += 1
                progress(done * template.document_tokens)

        try:
            while (first := next(blocks, None)) is not None:
                batch = counted(chain([first], islice(blocks, docs_per_shard - 1)))
                path = folder / f"{prefix}-{len(shards):06d}.tar"
                with new_shard(path, done, batch, template.vocab_size) as entry:
                    _append(file, {"shard": dataclasses.asdict(entry), "cursor": cursor})
                shards.append(entry)
        except ValueError:
            # The source is bad: there is nothing to resume, unless shards are finished.
            if not shards:
                (folder / PROGRESS_NAME).unlink(missing_ok=True)
                with suppress(OSError):
                    folder.rmdir()
            raise
        manifest = dataclasses.replace(template, shards=tuple(shards))
        for name, content in (extra_files or {}).items():
            write_atomically(folder / name, content)
        manifest.save(folder)
        (folder / PROGRESS_NAME).unlink()
    return load_manifest(folder)


def check_destination(folder: Path, known: set[str]) -> None:
    """Raise where the folder holds other files: the user may have given the wrong folder."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder}: found a file, wanted a folder to write into")
    names = {item.name for item in folder.iterdir()} if folder.exists() else set()
    if names and not names & known:
        raise ValueError(
            f"{folder}: holds other files ({min(names)}), wanted a new or an empty folder"
        )


def counting_on(progress: Progress, before: int) -> Progress:
    """`progress` for tokens that are counted after so many others."""
    return lambda tokens: progress(before + tokens)


def check_same_preparation(folder: Path, template: Manifest) -> None:
    """Raise ValueError if the folder holds finished shards of another source or other options."""
    if not (folder / PROGRESS_NAME).exists():
        return
    with (folder / PROGRESS_NAME).open("rb") as file:
        first, second = file.readline(), file.readline()
    # As long as no shard is finished, another source may replace this one.
    if second:
        job = parse_json(_Settings, first, f"{folder / PROGRESS_NAME}:1")
        _check_same_job(folder, job.source, template.source)


def finished_manifest(folder: Path, template: Manifest) -> Manifest | None:
    """The manifest of an earlier preparation that finished, None if there is none."""
    if not (folder / MANIFEST_NAME).exists():
        return None
    manifest = load_manifest(folder)
    _check_same_job(folder, manifest.source, template.source)
    for shard in manifest.shards:
        path = folder / shard.name
        if not path.exists() or path.stat().st_size != shard.bytes:
            raise ValueError(
                f"{path}: missing or short, but listed in {MANIFEST_NAME}; "
                f"prepare into another folder, or empty this one"
            )
    return manifest


def _check_same_job(folder: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for key in sorted(found.keys() | wanted.keys()):
        if found.get(key) != wanted.get(key):
            was, now = (shown(one.get(key, _UNSAID.get(key))) for one in (found, wanted))
            raise ValueError(
                f"{folder}: holds a preparation with {_OPTIONS.get(key, one_line(key))} {was}, "
                f"this one has {now}; wanted another folder, or the same source and options"
            )


def _read_progress(
    file: IO[bytes], folder: Path, template: Manifest, version: int
) -> tuple[list[ShardEntry], Cursor | None]:
    """The finished shards, and the cursor after them. Records after those are removed."""
    file.seek(0)
    lines = file.read().splitlines(keepends=True)
    # As long as no shard is finished, another source may replace this one.
    if len(lines) < 2 or not lines[0].endswith(b"\n"):
        file.truncate(0)
        _append(file, {"source": template.source, "version": version})
        return [], None
    where = folder / PROGRESS_NAME
    job = parse_json(_Settings, lines[0], f"{where}:1")
    _check_same_job(folder, job.source, template.source)
    if job.version != version:
        raise ValueError(
            f"{folder}: another version of longhaul has begun this preparation, whose texts and "
            "split this one would not continue; wanted another folder, or this one empty"
        )
    shards: list[ShardEntry] = []
    cursor = None
    kept = len(lines[0])
    for number, line in enumerate(lines[1:], start=2):
        if not line.endswith(b"\n"):
            break
        record = parse_json(_FinishedShard, line, f"{where}:{number}")
        entry = record.shard
        path = folder / entry.name
        if not path.exists() or path.stat().st_size != entry.bytes:
            break
        shards.append(entry)
        cursor = record.cursor
        kept += len(line)
    file.truncate(kept)
    return shards, cursor


def _append(file: IO[bytes], record: dict[str, Any]) -> None:
    file.write(json.dumps(record).encode() + b"\n")
    file.flush()
    os.fsync(file.fileno())
