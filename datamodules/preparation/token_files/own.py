"""The shards that `longhaul prepare` has written, to be prepared with other options."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from longhaul.datamodules.manifest import Manifest, load_manifest
from longhaul.datamodules.preparation.token_files.ids import Vocabulary
from longhaul.datamodules.preparation.token_files.sources import Items, Stream
from longhaul.datamodules.preparation.token_files.stored import Batch, Stored
from longhaul.datamodules.shards import Shard, check_file


@dataclass(frozen=True)
class OwnShard(Items):
    """A shard whose blocks hold whole documents, or what is kept of them."""

    name: str
    files: tuple[Path, ...]
    manifest: Manifest
    """Its own, which names no other shard."""

    def batches(self) -> Iterator[Batch]:
        shard, blocks = _opened(self.files[0], self.manifest)
        shard.check_content(self.manifest.vocab_size)
        whole = [np.array([self.manifest.document_tokens])] * len(blocks)
        for block, ends in zip(blocks, shard.ends or whole, strict=True):
            yield block.read(0, block.tokens), ends.astype(np.int64)


def open_own(name: str, folder: Path, vocabulary: Vocabulary) -> Iterator[Items | Stream]:
    """The shards of a folder with a manifest.

    Where texts were joined and cut into blocks, a text runs on from one block into the next, and
    they are one stream. Else what the shards take for documents are items.

    Raises:
        ValueError: they are damaged, or of another tokenizer.
    """
    manifest = load_manifest(folder)
    if manifest.tokenizer_sha256 != vocabulary.sha256:
        raise ValueError(
            f"{manifest.location}: found tokens of {manifest.tokenizer} with SHA-256 "
            f"{manifest.tokenizer_sha256[:12]}, wanted those of {vocabulary.name} with "
            f"{vocabulary.sha256[:12]} (--tokenizer)"
        )
    source = manifest.source
    is_stream = (
        # Version 1 has no ends.
        (manifest.boundaries == "ends" or source.get("kind") == "text")
        and source.get("packing", "concat") == "concat"
        and source.get("long", "split") == "split"
    )
    for number, entry in enumerate(manifest.shards):
        path = folder / entry.name
        check_file(path, entry)
        inner = f"{name}/{entry.name}" if name else entry.name
        own = replace(manifest, shards=(entry,))
        if is_stream:
            yield Stream(inner, _opened(path, own)[1], str(folder), number)
        else:
            yield OwnShard(inner, (path,), own)


def _opened(path: Path, manifest: Manifest) -> tuple[Shard, tuple[Stored, ...]]:
    """A shard, which knows where documents end, and its blocks."""
    length, dtype = manifest.document_tokens, np.dtype(manifest.dtype)
    has_ends = manifest.boundaries == "ends"
    shard = Shard(path, manifest.shards[0], length, dtype, has_ends=has_ends)
    blocks = (Stored(path, dtype, length, start * dtype.itemsize) for start in shard.starts)
    return shard, tuple(blocks)
