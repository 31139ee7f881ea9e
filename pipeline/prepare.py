"""`longhaul prepare`: a corpus as webdataset shards with a manifest."""

import argparse
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from tqdm import tqdm

from longhaul.datamodules.corpus import open_corpus
from longhaul.datamodules.longcrawl64 import open_store, parse_rows, prepare_longcrawl64
from longhaul.datamodules.manifest import Manifest
from longhaul.datamodules.text import prepare_text
from longhaul.datamodules.tokenizer import BUILT_IN, build_tokenizer

_SECONDS_BETWEEN_LINES = 5.0
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
    with _TokenProgress(total) as progress:
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
    with _TokenProgress(None) as progress:
        return prepare_text(
            open_corpus(sources),
            Path(destination),
            tokenizer,
            document_tokens=args.doc_tokens,
            docs_per_shard=args.docs_per_shard,
            validation_fraction=fraction,
            progress=progress.show,
        )


class _TokenProgress:
    """Tokens done and tokens a second: a bar on a terminal, otherwise a line every few seconds."""

    def __init__(self, total: int | None) -> None:
        self._total = total
        self._bar: tqdm[NoReturn] | None = None
        self._first: int | None = None
        self._started = self._shown = time.monotonic()

    def __enter__(self) -> "_TokenProgress":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def show(self, done: int) -> None:
        """Take note of the tokens done so far; the first call tells those of earlier starts."""
        if self._first is None:
            self._first = done
            self._started = self._shown = time.monotonic()
            if sys.stderr.isatty():
                self._bar = tqdm(total=self._total, initial=done, unit=" tokens", unit_scale=True)
        elif self._bar is not None:
            self._bar.update(done - self._bar.n)
        elif time.monotonic() - self._shown >= _SECONDS_BETWEEN_LINES:
            self._shown = time.monotonic()
            rate = (done - self._first) / (self._shown - self._started)
            of = f" of {self._total:,}" if self._total else ""
            print(f"{done:,}{of} tokens, {rate:,.0f} tokens/s", file=sys.stderr, flush=True)
