"""Prepare text: tokenize, concatenate with end-of-text ids, and cut into equal documents."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from longhaul.datamodules.manifest import Manifest
from longhaul.datamodules.preparation.corpus import Corpus, Text, in_validation
from longhaul.datamodules.preparation.resumable import (
    Cursor,
    Progress,
    check_destination,
    prepare_shards,
)
from longhaul.datamodules.shards import Tokens
from longhaul.datamodules.tokenizer import FileTokenizer, Tokenizer


def prepare_text(
    corpus: Corpus,
    destination: Path,
    tokenizer: Tokenizer,
    *,
    document_tokens: int = 65_536,
    docs_per_shard: int = 256,
    validation_fraction: float = 0.0,
    progress: Progress = lambda tokens: None,
) -> list[Manifest]:
    """Write shards of a corpus into `destination`.

    With a validation fraction, they go into its subfolders `train` and `validation`. The hash of
    its name decides to which of them a text belongs, so adding texts does not change the split of
    the others. The tokens after the last whole document are dropped, since padding would repeat
    text; the manifest counts them.

    Returns:
        The manifest, or those of `train` and `validation`.
    """
    if document_tokens < 1:
        raise ValueError(f"doc_tokens: found {document_tokens}, wanted 1 or more")
    if not 0 <= validation_fraction < 1:
        raise ValueError(f"validation fraction: found {validation_fraction}, wanted 0 to below 1")
    if validation_fraction == 0:
        splits = {"train": destination}
    else:
        check_destination(destination, {"train", "validation"})
        splits = {name: destination / name for name in ("train", "validation")}
    source = {
        "kind": "text",
        "corpus": corpus.description,
        "files": len(corpus.files),
        "files_sha256": corpus.fingerprint(),
        "validation_fraction": validation_fraction,
        "tokenizer_sha256": tokenizer.sha256,
        "document_tokens": document_tokens,
        "docs_per_shard": docs_per_shard,
    }
    manifests: list[Manifest] = []
    for split, folder in splits.items():
        dtype: Literal["uint16", "uint32"] = (
            "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
        )
        template = Manifest(
            tokenizer=tokenizer.name,
            tokenizer_sha256=tokenizer.sha256,
            vocab_size=tokenizer.vocab_size,
            bos_id=tokenizer.bos_id,
            eot_id=tokenizer.eot_id,
            document_tokens=document_tokens,
            dtype=dtype,
            source={**source, "split": split},
            shards=(),
        )
        before = sum(manifest.num_tokens for manifest in manifests)
        manifest = prepare_shards(
            folder,
            template,
            _PackedTexts(corpus, split, validation_fraction, tokenizer, document_tokens, dtype),
            docs_per_shard=docs_per_shard,
            prefix=split,
            # With a copy in the folder, the tokens can be decoded without the original file.
            extra_files={tokenizer.name: tokenizer.content}
            if isinstance(tokenizer, FileTokenizer)
            else {},
            progress=partial(_report, progress, before),
        )
        manifests.append(manifest)
    return manifests


def _report(progress: Progress, before: int, tokens: int) -> None:
    progress(before + tokens)


class _PackedTexts:
    """The texts of one split as documents.

    A cursor is [number of texts before, tokens already used of the next text].
    """

    def __init__(
        self,
        corpus: Corpus,
        split: str,
        validation_fraction: float,
        tokenizer: Tokenizer,
        document_tokens: int,
        dtype: str,
    ) -> None:
        self._corpus = corpus
        self._is_validation = split == "validation"
        self._fraction = validation_fraction
        self._tokenizer = tokenizer
        self._size = document_tokens
        self._dtype = np.dtype(dtype)
        self.dropped_tokens = 0

    def documents(self, cursor: Cursor | None) -> Iterator[tuple[Tokens, Cursor]]:
        first_text, used_before = cursor or [0, 0]
        pending: list[Tokens] = []
        waiting = 0
        for number, text in enumerate(self._texts()):
            if number < first_text:
                continue
            used = 0
            for tokens in self._tokens_of(text):
                skipped = max(0, used_before - used) if number == first_text else 0
                used += tokens.size
                pending.append(tokens[skipped:])
                waiting += pending[-1].size
                if waiting < self._size:
                    continue
                # Fewer tokens than one document were waiting, so every document ends in this text.
                joined = np.concatenate(pending)
                for end in range(self._size, waiting + 1, self._size):
                    yield joined[end - self._size : end], [number, used - (waiting - end)]
                waiting %= self._size
                pending = [joined[joined.size - waiting :]]
        self.dropped_tokens = waiting

    def _texts(self) -> Iterator[Text]:
        for text in self._corpus.texts():
            if in_validation(text.name, self._fraction) == self._is_validation:
                yield text

    def _tokens_of(self, text: Text) -> Iterator[Tokens]:
        for piece in text.pieces():
            yield self._tokenizer.encode(piece).astype(self._dtype)
        yield np.array([self._tokenizer.eot_id], self._dtype)
