"""The shards that `longhaul prepare` has written, to be prepared with other options."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from longhaul.datamodules.manifest import load_manifest
from longhaul.datamodules.preparation.token_files.ids import Vocabulary
from longhaul.datamodules.preparation.token_files.sources import Items, Stream
from longhaul.datamodules.preparation.token_files.stored import Stored
from longhaul.datamodules.preparation.token_files.tars import Tar
from longhaul.datamodules.shards import MEMBER_SUFFIX, Shard, check_file


def open_own(name: str, folder: Path, vocabulary: Vocabulary) -> Iterator[Items | Stream]:
    """The shards of a folder with a manifest.

    Where texts were joined and cut into blocks, a text runs on from one block into the next, and
    they are one stream. Else the blocks are items, of one text or of several.

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
    dtype = np.dtype(manifest.dtype)
    is_stream = (
        manifest.boundaries == "ends"
        and manifest.source.get("packing", "concat") == "concat"
        and manifest.source.get("long", "split") == "split"
    )
    for number, entry in enumerate(manifest.shards):
        path = folder / entry.name
        check_file(path, entry)
        inner = f"{name}/{entry.name}" if name else entry.name
        if not is_stream:
            yield Tar(inner, (path,), MEMBER_SUFFIX[1:])
            continue
        shard = Shard(path, entry, manifest.document_tokens, dtype)
        blocks = tuple(
            Stored(path, dtype, manifest.document_tokens, start * dtype.itemsize)
            for start in shard.starts
        )
        yield Stream(inner, blocks, str(folder), number)
