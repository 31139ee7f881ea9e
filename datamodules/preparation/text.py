"""Prepare text: tokenize, concatenate with end-of-text ids, and cut into blocks of one length."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from longhaul.datamodules.manifest import Manifest
from longhaul.datamodules.preparation.documents import Document
from longhaul.datamodules.preparation.formats import Text
from longhaul.datamodules.preparation.resumable import (
    Cursor,
    Progress,
    TooShortError,
    check_destination,
    prepare_shards,
    remove_preparation,
)
from longhaul.datamodules.preparation.source_files import (
    SourceFiles,
    files_in_validation,
    in_validation,
)
from longhaul.datamodules.shards import Block, Tokens
from longhaul.datamodules.tokenizer import FileTokenizer, Tokenizer

FEW_FILES = 100
"""Below this number of plain files, validation takes the end of each one, not whole files."""


def prepare_text(
    corpus: SourceFiles,
    destination: Path,
    tokenizer: Tokenizer,
    *,
    block_tokens: int = 65_536,
    docs_per_shard: int = 256,
    validation_fraction: float = 0.0,
    progress: Progress = lambda tokens: None,
) -> list[Manifest]:
    """Write shards of a corpus into `destination`.

    With a validation fraction, they go into its subfolders `train` and `validation`. The hash of
    its name decides to which of them a record belongs, so adding records does not change the split
    of the others. Plain files are taken in the order of such hashes until they have the fraction of
    all bytes. Of fewer than FEW_FILES plain files, the end of each one is for validation instead:
    whole files might leave nothing for a part. Texts without a token are skipped. The tokens after
    the last whole block are dropped, since padding would repeat text. The manifest counts both.

    Returns:
        The manifest, or those of `train` and `validation`.
    """
    cuts = cuts_files(corpus, validation_fraction)
    source = {
        "kind": "text",
        "corpus": corpus.description,
        "files": len(corpus.files),
        "files_sha256": corpus.fingerprint(),
        **({"validation_from": "the end of each file"} if cuts else {}),
    }

    def documents(is_validation: bool) -> Callable[[], Iterator[Document]]:
        texts = _texts_of(corpus, is_validation, validation_fraction, cuts)
        return partial(_tokenized, texts, tokenizer)

    return prepare_documents(
        documents,
        destination,
        tokenizer,
        source,
        block_tokens=block_tokens,
        docs_per_shard=docs_per_shard,
        validation_fraction=validation_fraction,
        progress=progress,
    )


def prepare_documents(
    documents: Callable[[bool], Callable[[], Iterator[Document]]],
    destination: Path,
    tokenizer: Tokenizer,
    source: dict[str, Any],
    *,
    block_tokens: int,
    docs_per_shard: int,
    validation_fraction: float,
    progress: Progress,
) -> list[Manifest]:
    """Write shards of documents into `destination`, or into `train` and `validation` below it.

    Args:
        documents: whether they are for validation -> what gives them, in a fixed order.
        source: what the manifest says of where they are from; the options are added.

    Returns:
        The manifest, or those of `train` and `validation`.
    """
    if block_tokens < 1:
        raise ValueError(f"doc_tokens: found {block_tokens}, wanted 1 or more")
    if not 0 <= validation_fraction < 1:
        raise ValueError(f"validation fraction: found {validation_fraction}, wanted 0 to below 1")
    if validation_fraction == 0:
        splits = {"train": destination}
    else:
        check_destination(destination, {"train", "validation"})
        splits = {name: destination / name for name in ("train", "validation")}
    source = {
        **source,
        "validation_fraction": validation_fraction,
        "tokenizer_sha256": tokenizer.sha256,
        "document_tokens": block_tokens,
        "docs_per_shard": docs_per_shard,
    }
    # With a copy in the folder, the tokens can be decoded without the original file.
    extra_files = (
        {tokenizer.name: tokenizer.content} if isinstance(tokenizer, FileTokenizer) else {}
    )
    manifests: dict[str, Manifest] = {}
    # Validation first: it is small, and the first to have too little text.
    for split, folder in sorted(splits.items(), reverse=True):
        dtype: Literal["uint16", "uint32"] = (
            "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
        )
        template = Manifest(
            tokenizer=tokenizer.name,
            tokenizer_sha256=tokenizer.sha256,
            vocab_size=tokenizer.vocab_size,
            bos_id=tokenizer.bos_id,
            eot_id=tokenizer.eot_id,
            document_tokens=block_tokens,
            dtype=dtype,
            boundaries="ends",
            source={**source, "split": split},
            shards=(),
        )
        before = sum(manifest.num_tokens for manifest in manifests.values())
        packed = _PackedDocuments(
            documents(split == "validation"), tokenizer.eot_id, block_tokens, dtype
        )
        try:
            manifests[split] = prepare_shards(
                folder,
                template,
                packed,
                docs_per_shard=docs_per_shard,
                prefix=split,
                extra_files=extra_files,
                progress=partial(_report, progress, before),
            )
        except TooShortError as error:
            # What is written would refuse the same text with other options.
            for each in (*manifests, split):
                remove_preparation(splits[each], extra_files)
            with suppress(OSError):
                destination.rmdir()
            # The largest power of two that fits: many contexts divide it.
            size = f" {1 << (error.tokens.bit_length() - 1)}" if error.tokens else ""
            fraction = ", --validation-fraction" if validation_fraction else ""
            options = f"--doc-tokens{size}{fraction}"
            raise ValueError(f"{error} ({options})") from None
        except ValueError:
            with suppress(OSError):
                destination.rmdir()
            raise
    return [manifests[split] for split in splits]


def cuts_files(corpus: SourceFiles, validation_fraction: float) -> bool:
    """Whether the end of each plain file is for validation, rather than whole files."""
    return validation_fraction > 0 and 0 < len(corpus.plain_files) < FEW_FILES


def _report(progress: Progress, before: int, tokens: int) -> None:
    progress(before + tokens)


def _texts_of(
    corpus: SourceFiles, is_validation: bool, fraction: float, cuts: bool
) -> Callable[[], Iterator[Text]]:
    """A function that gives the texts of one split."""
    chosen = frozenset() if cuts or not fraction else files_in_validation(corpus, fraction)

    def texts() -> Iterator[Text]:
        for text in corpus.texts():
            if text.is_file and cuts:
                yield Text(text.name, partial(_part_of, text, is_validation, fraction))
            elif text.is_file:
                if (text.name in chosen) == is_validation:
                    yield text
            elif in_validation(text.name, fraction) == is_validation:
                yield text

    return texts


def _part_of(text: Text, is_validation: bool, fraction: float) -> Iterator[str]:
    """The last characters of a text for validation, the others for training."""
    characters = sum(map(len, text.pieces()))
    left = characters - round(characters * fraction)
    for piece in text.pieces():
        part = piece[left:] if is_validation else piece[:left]
        left = max(0, left - len(piece))
        if part:
            yield part
        if not is_validation and left == 0:
            return


def _tokenized(texts: Callable[[], Iterator[Text]], tokenizer: Tokenizer) -> Iterator[Document]:
    """The texts as documents; each is tokenized piece by piece, while it is read."""
    for text in texts():
        yield Document(text.name, partial(_tokens_of, text, tokenizer), text.is_file)


def _tokens_of(text: Text, tokenizer: Tokenizer) -> Iterator[Tokens]:
    for piece in text.pieces():
        try:
            yield tokenizer.encode(piece).view(np.uint64)
        except ValueError as error:
            raise ValueError(f"{text.name}: {error}") from None


class _PackedDocuments:
    """Documents as blocks; each is followed by the id that ends it.

    A cursor is [number of documents before, tokens already used of the next one, empty ones so
    far].
    """

    version = 3

    def __init__(
        self,
        documents: Callable[[], Iterator[Document]],
        eot_id: int,
        block_tokens: int,
        dtype: str,
    ) -> None:
        self._documents = documents
        self._size = block_tokens
        self._dtype = np.dtype(dtype)
        self._end = np.array([eot_id], self._dtype)
        self.dropped_tokens = 0
        self.empty_texts = 0

    def blocks(self, cursor: Cursor | None) -> Iterator[tuple[Block, Cursor]]:
        first_document, used_before, self.empty_texts = cursor or [0, 0, 0]
        pending: list[Tokens] = []
        waiting = 0
        ends: list[int] = []  # of the documents that are waiting and whole
        for number, document in enumerate(self._documents()):
            if number < first_document:
                continue
            used = 0
            for tokens in self._tokens_of(document):
                skipped = max(0, used_before - used) if number == first_document else 0
                used += tokens.size
                pending.append(tokens[skipped:])
                waiting += pending[-1].size
                if waiting < self._size:
                    continue
                # Fewer tokens than one block were waiting, so every block ends in this document.
                joined = np.concatenate(pending)
                for end in range(self._size, waiting + 1, self._size):
                    here = [number, used - (waiting - end), self.empty_texts]
                    own = np.array([*ends, self._size], np.uint32)
                    yield Block(joined[end - self._size : end], own), here
                    ends = []
                waiting %= self._size
                pending = [joined[joined.size - waiting :]]
            if waiting and used:
                ends.append(waiting)
        self.dropped_tokens = waiting

    def _tokens_of(self, document: Document) -> Iterator[Tokens]:
        is_empty = True
        for piece in document.pieces():
            is_empty = is_empty and not piece.size
            yield piece.astype(self._dtype)
        if is_empty:
            self.empty_texts += 1
        else:
            yield self._end
