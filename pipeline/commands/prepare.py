"""`longhaul prepare`: a corpus as webdataset shards with a manifest."""

import argparse
from pathlib import Path

from longhaul.datamodules.manifest import Manifest
from longhaul.datamodules.preparation.corpus import open_corpus
from longhaul.datamodules.preparation.longcrawl64 import open_store, parse_rows, prepare_longcrawl64
from longhaul.datamodules.preparation.text import prepare_text
from longhaul.datamodules.tokenizer import BUILT_IN, build_tokenizer
from longhaul.pipeline.terminal.progress import TokenProgress

_STDLIB_VALIDATION_FRACTION = 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The sources and their options."""
    kinds = parser.add_subparsers(dest="kind", required=True)
    zarr = kinds.add_parser("longcrawl64", help="LongCrawl64's Zarr v2 layout")
    zarr.add_argument("source", metavar="SRC.zarr", type=Path)
    zarr.add_argument("destination", metavar="DST", type=Path)
    zarr.add_argument(
        "--rows", metavar="A:B", help="rows A to B-1; several with commas between; or `whole`"
    )
    text = kinds.add_parser(
        "text",
        help="files or folders of text, .jsonl, .jsonl.gz or .parquet; none: Python's own sources",
    )
    text.add_argument("paths", metavar="[SRC ...] DST", nargs="+")
    text.add_argument(
        "--tokenizer",
        default="bytes",
        help=f"{', '.join(BUILT_IN)}, or the path of a tokenizer.json (bytes)",
    )
    text.add_argument(
        "--doc-tokens", type=int, default=65_536, metavar="N", help="tokens per document (65536)"
    )
    text.add_argument(
        "--validation-fraction",
        type=float,
        metavar="F",
        help="write DST/train and DST/validation, the latter from this share of the files or "
        f"records, by the hash of their names (0; without SRC {_STDLIB_VALIDATION_FRACTION})",
    )
    for command in (zarr, text):
        command.add_argument(
            "--docs-per-shard", type=int, default=256, metavar="N", help="documents per shard (256)"
        )


def main(args: argparse.Namespace) -> int:
    """Prepare, or finish an interrupted preparation, or say that it was done before."""
    manifests = _longcrawl64(args) if args.kind == "longcrawl64" else _text(args)
    for manifest in manifests:
        dropped = f", {manifest.dropped_tokens:,} dropped" if manifest.dropped_tokens else ""
        print(
            f"{manifest.location}: {manifest.num_tokens:,} tokens{dropped}, "
            f"{manifest.num_documents:,} documents, {len(manifest.shards):,} shards"
        )
    return 0


def _longcrawl64(args: argparse.Namespace) -> list[Manifest]:
    store = open_store(args.source)
    ranges = parse_rows(store, args.rows)
    total = sum(end - start for start, end in ranges) * store.columns
    with TokenProgress(total) as progress:
        manifest = prepare_longcrawl64(
            store,
            args.destination,
            ranges,
            docs_per_shard=args.docs_per_shard,
            progress=progress.show,
        )
    return [manifest]


def _text(args: argparse.Namespace) -> list[Manifest]:
    *sources, destination = args.paths
    fraction = args.validation_fraction
    if fraction is None:
        fraction = 0.0 if sources else _STDLIB_VALIDATION_FRACTION
    tokenizer = build_tokenizer(args.tokenizer)
    with TokenProgress(None) as progress:
        return prepare_text(
            open_corpus(sources),
            Path(destination),
            tokenizer,
            document_tokens=args.doc_tokens,
            docs_per_shard=args.docs_per_shard,
            validation_fraction=fraction,
            progress=progress.show,
        )
