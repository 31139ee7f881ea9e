"""Where the sample of a run comes from: shard, block and window, and files and records."""

import tempfile
from typing import Any

import numpy as np

from longhaul.configs import RunConfig
from longhaul.datamodules.files.untrusted import one_line
from longhaul.pipeline.preparation.statistics import open_store, pieces_of
from longhaul.pipeline.runs.data import present_corpus
from longhaul.pipeline.runs.folder import RunFolder

_SHOWN_TOKENS = 96


def trace(config: RunConfig, number: int) -> dict[str, Any]:
    """Where sample `number` of a run's training, counted from 0, comes from.

    Returns values for JSON: the update that reads it, epoch, manifest, shard, block, first token in
    the block, and for each document in the window its name, the numbers of its first token here and
    of the one behind its last, and its beginning as text. Without names these are null.

    Raises:
        ValueError: the data cannot be read, or the shard is damaged.
        OSError: a file cannot be read.
    """
    if number < 0:
        raise ValueError(f"--sample: found {number}, wanted 0 or more")
    data = config.data
    corpus = present_corpus(RunFolder.of(config), data, "manifest")
    order = corpus.training_order(
        data.context, config.trainer.seed, data.shuffle_shards, config.samples_per_update
    )
    found = order.locate_many(np.array([number], np.int64))
    source, epoch, position, block, window = (int(part[0]) for part in found)
    manifest = corpus.sources[source]
    first = window * data.context
    tokenizer = corpus.load_tokenizer()
    with tempfile.TemporaryDirectory(prefix="longhaul-shards-") as folder:
        shard = open_store(manifest, data.cache_dir or folder)[position]
        start = shard.starts[block]
        documents = []
        for piece in pieces_of(shard, block, manifest):
            begin, end = max(piece.start, first), min(piece.end, first + data.context)
            if begin >= end:
                continue
            shown = shard.tokens[start + begin : start + min(end, begin + _SHOWN_TOKENS)]
            before = None if piece.first is None else piece.first - piece.start
            documents.append(
                {
                    "name": piece.name,
                    "first": None if before is None else before + begin,
                    "end": None if before is None else before + end,
                    "tokens": end - begin,
                    "text": one_line(tokenizer.decode(shown.tolist())),
                }
            )
    return {
        "sample": number,
        "update": number // config.samples_per_update,
        "epoch": epoch,
        "manifest": manifest.location,
        "shard": manifest.shards[position].name,
        "block": block,
        "first": first,
        "end": first + data.context,
        "documents": documents,
    }


def print_trace(found: dict[str, Any]) -> None:
    """Print what `trace` returns."""
    print(f"sample {found['sample']:,}: update {found['update']:,}, epoch {found['epoch']}")
    print(
        f"{found['manifest']}: {found['shard']}, block {found['block']}, tokens "
        f"{found['first']:,} to {found['end'] - 1:,}"
    )
    for one in found["documents"]:
        if one["name"] is None:
            print(f"  {one['tokens']:,} tokens of a document (prepared without names)")
        else:
            print(f"  {one_line(one['name'])}, tokens {one['first']:,} to {one['end'] - 1:,}")
        print(f"    {one['text']!r}")
