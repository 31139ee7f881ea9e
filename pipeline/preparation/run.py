"""Prepares a corpus as webdataset shards, and prints what was written."""

from collections.abc import Sequence
from pathlib import Path

from longhaul.datamodules.manifest import Manifest
from longhaul.datamodules.preparation.corpus import open_corpus
from longhaul.datamodules.preparation.longcrawl64 import open_store, parse_rows, prepare_longcrawl64
from longhaul.datamodules.preparation.text import prepare_text
from longhaul.datamodules.tokenizer import build_tokenizer
from longhaul.pipeline.terminal.progress import TokenProgress


def prepare_from_longcrawl64(
    source: Path, destination: Path, *, rows: str | None, docs_per_shard: int
) -> None:
    """Prepare rows of a Zarr store, or finish an interrupted preparation; print a summary.

    Args:
        source: the store.
        destination: folder of the shards.
        rows: as `parse_rows` reads them, such as "0:1000" or "0:10,50:60"; None means all.
        docs_per_shard: documents per shard.
    """
    store = open_store(source)
    ranges = parse_rows(store, rows)
    total = sum(end - start for start, end in ranges) * store.columns
    with TokenProgress(total) as progress:
        manifest = prepare_longcrawl64(
            store, destination, ranges, docs_per_shard=docs_per_shard, progress=progress.show
        )
    _print_summary([manifest])


def prepare_from_text(
    sources: list[str],
    destination: Path,
    *,
    tokenizer: str,
    document_tokens: int,
    docs_per_shard: int,
    validation_fraction: float,
) -> None:
    """Prepare text files, or finish an interrupted preparation; print a summary.

    Args:
        sources: files and folders of text; none means the sources of Python's standard library.
        destination: folder of the shards.
        tokenizer: its name, or the path of a tokenizer.json.
        document_tokens: tokens per document.
        docs_per_shard: documents per shard.
        validation_fraction: share of the text that becomes validation data.
    """
    built = build_tokenizer(tokenizer)
    with TokenProgress(None) as progress:
        manifests = prepare_text(
            open_corpus(sources),
            destination,
            built,
            document_tokens=document_tokens,
            docs_per_shard=docs_per_shard,
            validation_fraction=validation_fraction,
            progress=progress.show,
        )
    _print_summary(manifests)


def _print_summary(manifests: Sequence[Manifest]) -> None:
    for manifest in manifests:
        dropped = f", {manifest.dropped_tokens:,} dropped" if manifest.dropped_tokens else ""
        print(
            f"{manifest.location}: {manifest.num_tokens:,} tokens{dropped}, "
            f"{manifest.num_documents:,} documents, {len(manifest.shards):,} shards"
        )
