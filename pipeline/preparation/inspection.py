"""What a folder of shards holds, as people and programs read it, and its card."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longhaul.datamodules.corpus import Corpus
from longhaul.datamodules.files.atomic import write_atomically
from longhaul.datamodules.files.untrusted import one_line
from longhaul.datamodules.manifest import Manifest
from longhaul.pipeline.preparation.statistics import Bin, Sample, Statistics, measure
from longhaul.pipeline.terminal.progress import TokenProgress
from longhaul.pipeline.terminal.table import print_table

CARD_NAME = "DATA_CARD.md"


def inspect(corpora: Sequence[Corpus]) -> list[dict[str, Any]]:
    """Print what corpora of one source hold.

    Returns the same as values for JSON.

    Raises:
        ValueError: one is damaged.
        OSError: a file cannot be read.
    """
    reports = []
    for number, corpus in enumerate(corpora):
        if number:
            print()
        (manifest,) = corpus.sources
        with TokenProgress(manifest.num_tokens) as progress:
            found = measure(manifest, progress=progress.show)
        report = _report(corpus, manifest, found)
        _print(manifest, found, report)
        reports.append(report)
    return reports


def write_card(folder: Path, manifest: Manifest) -> None:
    """Write `DATA_CARD.md` beside the shards of a manifest that was just written.

    Raises OSError if it cannot be written.
    """
    found = measure(manifest, reads_all=False)
    tokenizer = f"{manifest.tokenizer}, {manifest.vocab_size:,} ids"
    rows = [
        ("tokens", f"{manifest.num_tokens:,}"),
        ("documents", _documents(found)),
        ("blocks", f"{manifest.num_blocks:,} of {manifest.document_tokens:,} tokens"),
        ("shards", f"{len(manifest.shards):,}, SHA-256 of their hashes {manifest.shards_sha256}"),
        ("tokenizer", f"{tokenizer}, SHA-256 {one_line(manifest.tokenizer_sha256)}"),
        ("id that ends a document", str(manifest.eot_id)),
        ("id that training puts before one", f"{manifest.bos_id}, not in the shards"),
        ("padding", "none"),
        *_dropped(manifest),
    ]
    options = [(one_line(key), one_line(value)) for key, value in manifest.source.items()]
    lines = [
        "# Data card",
        "",
        "Written by `longhaul prepare`. What licence the texts have, and where they are from, is "
        "for whoever prepared them to add.",
        "",
        *_table(("what", "value"), rows),
        "",
        "## Lengths of the documents, in tokens",
        "",
        *_table(("from", "to", "documents", "tokens"), _lengths(found.bins)),
        "",
        "## Source and options",
        "",
        *_table(("key", "value"), options),
    ]
    for leftover in folder.glob(f".{CARD_NAME}.*.tmp"):  # of a process that was killed here
        leftover.unlink(missing_ok=True)
    write_atomically(folder / CARD_NAME, "\n".join(lines) + "\n")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


def _report(corpus: Corpus, manifest: Manifest, found: Statistics) -> dict[str, Any]:
    try:
        tokenizer = corpus.load_tokenizer()
    except (OSError, ValueError) as error:
        texts: list[str | None] = [None] * len(found.samples)
        reason = one_line(error)
    else:
        texts = [one_line(tokenizer.decode(one.tokens.tolist())) for one in found.samples]
        reason = ""
    return {
        "manifest": manifest.location,
        "format_version": manifest.format_version,
        "tokenizer": manifest.tokenizer,
        "shards_sha256": manifest.shards_sha256,
        "tokens": manifest.num_tokens,
        "blocks": manifest.num_blocks,
        "shards": len(manifest.shards),
        "documents": found.documents,
        "documents_cut": found.cut,
        "duplicates": found.duplicates,
        "documents_not_compared": found.not_compared,
        "smallest_id": found.smallest_id,
        "largest_id": found.largest_id,
        "padding_tokens": 0,
        "dropped_tokens": manifest.dropped_tokens,
        "empty_texts": manifest.empty_texts,
        "dropped": {reason: dataclasses.asdict(lost) for reason, lost in manifest.dropped.items()},
        "lengths": [one._asdict() for one in found.bins],
        "samples": [
            {
                "shard": one.shard,
                "block": one.block,
                "first": one.piece.start,
                "end": one.piece.end,
                "name": one.piece.name,
                "first_in_document": one.piece.first,
                "text": text,
            }
            for one, text in zip(found.samples, texts, strict=True)
        ],
        "not_decoded": reason,
    }


def _print(manifest: Manifest, found: Statistics, report: dict[str, Any]) -> None:
    print(f"{manifest.location} (format {manifest.format_version}, {manifest.tokenizer})")
    blocks = f"{manifest.num_blocks:,} blocks of {manifest.document_tokens:,}"
    rows = [
        ["tokens", f"{manifest.num_tokens:,} in {blocks}, {len(manifest.shards):,} shards"],
        ["documents", _documents(found)],
        ["duplicates", _duplicates(found)],
        ["ids", f"{found.smallest_id:,} to {found.largest_id:,} of {manifest.vocab_size:,}"],
        ["padding", "none"],
        *map(list, _dropped(manifest)),
    ]
    print_table(rows, align=str.ljust)
    total = sum(one.tokens for one in found.bins)
    shares = [f"{one.tokens / total:.1%}" for one in found.bins]
    lengths = [[*row, share] for row, share in zip(_lengths(found.bins), shares, strict=True)]
    print_table([["documents from", "to tokens", "documents", "tokens", "share"], *lengths])
    for sample, shown in zip(found.samples, report["samples"], strict=True):
        print(_place(sample))
        print(f"  {shown['text']!r}" if shown["text"] is not None else "  not decoded")
    if report["not_decoded"]:
        print(f"not decoded: {report['not_decoded']}")


def _lengths(bins: list[Bin]) -> list[list[str]]:
    return [[f"{number:,}" for number in one] for one in bins]


def _documents(found: Statistics) -> str:
    cut = f", {found.cut:,} of them without their end" if found.cut else ""
    return f"{found.documents:,}{cut}"


def _duplicates(found: Statistics) -> str:
    share = (found.duplicates or 0) / max(1, found.documents)
    rest = f"; {found.not_compared:,} not compared" if found.not_compared else ""
    return f"{found.duplicates:,} documents ({share:.2%}) have the tokens of an earlier one{rest}"


def _dropped(manifest: Manifest) -> list[tuple[str, str]]:
    """What was left out, a row each."""
    total = manifest.num_tokens + manifest.dropped_tokens
    rows = [
        (
            "dropped",
            f"{manifest.dropped_tokens:,} tokens that fill no block "
            f"({manifest.dropped_tokens / total:.2%}), {manifest.empty_texts:,} empty texts",
        )
    ]
    for reason, lost in manifest.dropped.items():
        text = f"{lost.tokens:,} tokens of {lost.documents:,} documents"
        rows.append((f"dropped by {one_line(reason)}", text))
    return rows


def _place(sample: Sample) -> str:
    piece = sample.piece
    where = f"{sample.shard}, block {sample.block}, tokens {piece.start:,} to {piece.end - 1:,}"
    if piece.name is None or piece.first is None:
        return f"{where} (prepared without names)"
    return f"{where}: {one_line(piece.name)} from its token {piece.first:,} on"
