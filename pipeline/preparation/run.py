"""Prepares a corpus as webdataset shards, and prints what was written."""

import os
from collections.abc import Sequence
from pathlib import Path

from longhaul.datamodules.manifest import MANIFEST_NAME, Manifest
from longhaul.datamodules.preparation.longcrawl64 import open_store, parse_rows, prepare_longcrawl64
from longhaul.datamodules.preparation.packing import Packing
from longhaul.datamodules.preparation.source_files import open_sources
from longhaul.datamodules.preparation.text import cuts_files, prepare_text
from longhaul.datamodules.preparation.token_files.sources import Separator
from longhaul.datamodules.preparation.tokens import open_token_files, prepare_tokens
from longhaul.datamodules.preparation.units import Part
from longhaul.datamodules.tokenizer import build_tokenizer
from longhaul.pipeline.terminal.progress import TokenProgress

# A share that differs from the one asked for by less than this part of it needs no explanation.
_CLOSE = 0.1
_REASONS = {
    "min_tokens": "dropped by --min-tokens",
    "max_tokens": "dropped by --max-tokens",
    "drop": "longer than a block, dropped",
    "crop": "longer than a block, cropped",
}


def prepare_from_longcrawl64(
    source: Path, destination: Path, *, rows: str | None, docs_per_shard: int
) -> None:
    """Prepare rows of a Zarr store, or finish an interrupted preparation; print a summary.

    Args:
        source: the store.
        destination: folder of the shards.
        rows: as `parse_rows` reads them, such as "0:1000" or "0:10,50:60"; None means all.
        docs_per_shard: blocks per shard.
    """
    store = open_store(source)
    ranges = parse_rows(store, rows)
    total = sum(end - start for start, end in ranges) * store.columns
    there = _prepared([destination])
    with TokenProgress(total) as progress:
        manifest = prepare_longcrawl64(
            store, destination, ranges, docs_per_shard=docs_per_shard, progress=progress.show
        )
    _print_summary([manifest], there)


def prepare_from_text(
    sources: list[str],
    destination: Path,
    *,
    tokenizer: str,
    packing: Packing,
    docs_per_shard: int,
    validation_fraction: float,
    bos: str | None,
    eos: str | None,
    workers: int | None,
    part: Part | None,
    text_key: str,
    pattern: str | None,
) -> None:
    """Prepare text files, or finish an interrupted preparation; print a summary.

    Args:
        sources: files and folders of text, or STANDARD_LIBRARY.
        destination: folder of the folders `train` and, unless the fraction is 0, `validation`.
        tokenizer: its name, or the path of its file.
        packing: how texts become blocks.
        docs_per_shard: blocks per shard.
        validation_fraction: share of the text that becomes validation data.
        bos, eos, pattern: as `build_tokenizer` takes them.
        workers: processes that tokenize; None is one for each processor that this one may use.
        part: what to tokenize, without writing shards; None is everything.
        text_key: the name of the texts in files of records, or a path with dots to them.
    """
    built = build_tokenizer(tokenizer, bos=bos, eos=eos, pattern=pattern)
    corpus = open_sources(sources, destination, text_key)
    folders = [destination / name for name in ("train", "validation")]
    there = _prepared(folders)
    with TokenProgress(None, "tokenized") as tokenized, TokenProgress(None, "packed") as packed:
        manifests = prepare_text(
            corpus,
            destination if validation_fraction else folders[0],
            built,
            packing=packing,
            docs_per_shard=docs_per_shard,
            validation_fraction=validation_fraction,
            workers=workers or len(os.sched_getaffinity(0)),
            part=part,
            tokenized=tokenized.show,
            packed=packed.show,
        )
    if part is not None and not manifests:
        print(f"{destination}: part {part.index} of {part.of} is tokenized")
        return
    _print_summary(manifests, there)
    if validation_fraction:
        train, validation = (manifest.num_tokens for manifest in manifests)
        share = validation / (train + validation)
        what = "the end of each file" if cuts_files(corpus, validation_fraction) else "whole texts"
        print(
            f"validation: {share:.2g} of the tokens, {what} "
            f"(--validation-fraction {validation_fraction:g})"
        )
        if abs(share - validation_fraction) > _CLOSE * validation_fraction:
            print(f"that is not {validation_fraction:g}: {_why(manifests[1], what)}")
    else:
        print("no validation part, as --validation-fraction is 0")


def prepare_from_tokens(
    sources: list[Path],
    destination: Path,
    *,
    tokenizer: str,
    raw: str | None,
    column: str | None,
    separator: Separator | None,
    packing: Packing,
    docs_per_shard: int,
    validation_fraction: float,
    bos: str | None,
    eos: str | None,
    pattern: str | None,
    workers: int | None,
    part: Part | None,
) -> None:
    """Prepare files of tokens, or finish an interrupted preparation; print a summary.

    Args:
        sources: files and folders of tokens.
        raw, column, separator: as of `open_token_files`.
        others: as of `prepare_from_text`.
    """
    built = build_tokenizer(tokenizer, bos=bos, eos=eos, pattern=pattern)
    files = open_token_files(sources, built, raw=raw, column=column, separator=separator)
    print(
        f"{files.format}, {files.files:,} files; separator {files.found.separator}: "
        f"{files.found.reason}"
    )
    folders = [destination / name for name in ("train", "validation")]
    there = _prepared(folders)
    with TokenProgress(None, "read") as read, TokenProgress(None, "packed") as packed:
        manifests = prepare_tokens(
            files,
            destination if validation_fraction else folders[0],
            built,
            packing=packing,
            docs_per_shard=docs_per_shard,
            validation_fraction=validation_fraction,
            workers=workers or len(os.sched_getaffinity(0)),
            part=part,
            tokenized=read.show,
            packed=packed.show,
        )
    if part is not None and not manifests:
        print(f"{destination}: part {part.index} of {part.of} is read")
        return
    _print_summary(manifests, there)


def _why(validation: Manifest, what: str) -> str:
    """Why the validation part has another share of the tokens than was asked for."""
    if validation.dropped_tokens > _CLOSE * validation.num_tokens:
        return (
            f"it drops {validation.dropped_tokens:,} tokens that fill no block; smaller "
            "--doc-tokens drop fewer"
        )
    if what == "whole texts":
        return "texts differ in length, and are not divided"
    return "tokens differ in length, and each text ends with one more"


def _prepared(folders: Sequence[Path]) -> list[str]:
    """The manifests that are in these folders."""
    files = (folder / MANIFEST_NAME for folder in folders)
    return [str(file.absolute()) for file in files if file.exists()]


def _print_summary(manifests: Sequence[Manifest], there: Sequence[str]) -> None:
    """Print what was written, or was `there` before; cards are written beside the shards."""
    # Imported here: it loads torch, before which a bad source is refused.
    from longhaul.pipeline.preparation.inspection import CARD_NAME, write_card

    for manifest in manifests:
        folder = Path(manifest.location).parent
        if not (folder / CARD_NAME).exists():
            write_card(folder, manifest)
        before = "was there already, " if manifest.location in there else ""
        dropped = f", {manifest.dropped_tokens:,} dropped" if manifest.dropped_tokens else ""
        empty = f", {manifest.empty_texts:,} empty texts skipped" if manifest.empty_texts else ""
        print(
            f"{manifest.location}: {before}{manifest.num_tokens:,} tokens{dropped}, "
            f"{manifest.num_blocks:,} blocks, {len(manifest.shards):,} shards{empty}"
        )
        for reason, lost in manifest.dropped.items():
            print(f"{_REASONS[reason]}: {lost.documents:,} texts, {lost.tokens:,} tokens lost")
