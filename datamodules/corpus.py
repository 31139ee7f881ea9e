"""The tokens that a run reads: their tokenizer, number, fingerprint and order."""

import math
import os
import re
from collections.abc import Sequence
from pathlib import Path

from longhaul.datamodules.config import DataConfig
from longhaul.datamodules.files.atomic import write_atomically
from longhaul.datamodules.files.untrusted import one_line
from longhaul.datamodules.manifest import MANIFEST_NAME, Manifest, ShardEntry, load_manifest
from longhaul.datamodules.order import SampleOrder, StoredOrder
from longhaul.datamodules.tokenizer import (
    BUILT_IN,
    FileTokenizer,
    Tokenizer,
    build_tokenizer,
    read_tokenizer,
)
from longhaul.datamodules.urls import at_home, is_remote, local_path

# What two records of the same data have in common, beside the fingerprint.
_IDS = ("tokenizer_sha256", "vocab_size", "bos_id")
_SAME = (*_IDS, "eot_id", "document_tokens", "dtype")
_SHOWN_DIGITS = 12


class Corpus:
    """Blocks of tokens of one length and one tokenizer, whatever files they are in.

    Only this class and the ShardStore that reads a source know of what kind the source is. There is
    one source: the shards of a manifest. A sample's location names its source by the index in
    `sources`.
    """

    def __init__(self, source: Manifest) -> None:
        self.sources = (source,)
        # What is said of each in Manifest holds for all sources together.
        self.location = source.location
        self.tokenizer_name = source.tokenizer
        self.tokenizer_sha256 = source.tokenizer_sha256
        self.vocab_size = source.vocab_size
        self.bos_id = source.bos_id
        self.eot_id = source.eot_id
        self.block_tokens = source.document_tokens
        self.has_ends = source.boundaries == "ends"
        """Whether the ends of the documents in each block are known."""
        self.num_blocks = source.num_blocks
        self.num_tokens = source.num_tokens
        self.dropped_tokens = source.dropped_tokens
        self.origin = source.source
        self.fingerprint = source.shards_sha256

    @property
    def files(self) -> list[tuple[str, ShardEntry]]:
        """The path or URL of every shard, and its size and hash."""
        return [(one.url_of(shard.name), shard) for one in self.sources for shard in one.shards]

    @property
    def name(self) -> str:
        """The last two folders of its path or URL, such as `gpt2/train`."""
        location = self.location
        if not is_remote(location):
            location = os.fspath(local_path(location).absolute())
        path = re.sub(r"^[\w+.-]+://([^/@]*@)?", "", location).partition(MANIFEST_NAME)[0]
        return "/".join([part for part in path.split("/") if part][-2:]) or "unknown"

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer that made the ids. A tokenizer.json is read from beside the corpus.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is another tokenizer.
        """
        (source,) = self.sources
        if self.tokenizer_name in BUILT_IN:
            tokenizer = build_tokenizer(self.tokenizer_name)
        else:
            url = source.url_of(self.tokenizer_name)
            tokenizer = read_tokenizer(url, bos=self.bos_id, eos=self.eot_id)
        if tokenizer.sha256 != self.tokenizer_sha256:
            raise ValueError(
                f"{self.location}: tokenizer_sha256 is {self.tokenizer_sha256}, "
                f"but {self.tokenizer_name} has {tokenizer.sha256}"
            )
        for key in ("vocab_size", "bos_id", "eot_id"):
            found, wanted = getattr(self, key), getattr(tokenizer, key)
            if found != wanted:
                raise ValueError(
                    f"{self.location}: {key}: found {found}, wanted {wanted} as in "
                    f"{self.tokenizer_name}"
                )
        return tokenizer

    def windows_per_block(self, context: int, key: str = "data.context") -> int:
        """Samples of `context` tokens per block.

        Raises:
            ValueError: the context, which was given with `key`, does not divide the block.
        """
        length = self.block_tokens
        if not 1 <= context <= length or length % context:
            small = [d for d in range(1, math.isqrt(length) + 1) if length % d == 0]
            divisors = [*small, *(length // d for d in small)]
            below = max((d for d in divisors if d <= context), default=1)
            raise ValueError(
                f"{key}: {context} does not divide the blocks' {length} tokens "
                f"({self.location}); the nearest below that does is {below}"
            )
        return length // context

    def training_order(self, context: int, seed: int, shuffle_shards: int) -> SampleOrder:
        """The order in which training reads samples of `context` tokens."""
        windows = self.windows_per_block(context)
        return SampleOrder(self._blocks_of_shards(), windows, seed, shuffle_shards)

    def stored_order(self, context: int) -> StoredOrder:
        """The order of validation: samples of `context` tokens as they are stored."""
        return StoredOrder(self._blocks_of_shards(), self.windows_per_block(context))

    def _blocks_of_shards(self) -> list[int]:
        (source,) = self.sources
        return [shard.documents for shard in source.shards]

    def ids_differ(self, wanted: "Corpus") -> str:
        """What was found and what was wanted, if its ids do not mean what those of `wanted` do."""
        return self._difference(wanted, _IDS)

    def differs(self, wanted: "Corpus") -> str:
        """What was found and what was wanted; empty if both are the same data, perhaps moved."""
        if difference := self._difference(wanted, _SAME):
            return difference
        if self.fingerprint != wanted.fingerprint:
            return (
                f"found other shards in {self.location}, wanted the same ones as in "
                f"{wanted.location}"
            )
        return ""

    def _difference(self, wanted: "Corpus", keys: Sequence[str]) -> str:
        for ours, theirs in zip(self.sources, wanted.sources, strict=True):
            for key in keys:
                if getattr(ours, key) != getattr(theirs, key):
                    (name, now), (_, before) = _shown(ours, key), _shown(theirs, key)
                    return (
                        f"found {name} {now} in {self.location}, wanted {before} as in "
                        f"{wanted.location}"
                    )
        return ""

    def record(self, folder: Path, *, with_tokenizer: bool) -> None:
        """Write the description of the corpus into a folder, from which `load_corpus` reads it.

        Args:
            folder: is made if it does not exist.
            with_tokenizer: whether the tokenizer is written too, if it is a file.

        Raises:
            OSError: a file cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer = self.load_tokenizer()
        if with_tokenizer and isinstance(tokenizer, FileTokenizer):
            write_atomically(folder / self.tokenizer_name, tokenizer.content)
        (source,) = self.sources
        source.save(folder)


def corpus_of(data: DataConfig, key: str = "manifest") -> Corpus:
    """The corpus that a key of the config names, with the errors of `load_corpus`."""
    return load_corpus(getattr(data, key))


def load_corpus(location: str | Path) -> Corpus:
    """The corpus that the manifest at a path or URL describes; its folder will do too.

    Raises:
        OSError: it cannot be read; FileNotFoundError: it does not exist.
        ValueError: it is no manifest.
    """
    return Corpus(load_manifest(location))


def find_corpora(location: str) -> list[Corpus]:
    """The corpus at a path or URL, or all that are in the folders of a folder.

    Raises:
        OSError: one cannot be read.
        ValueError: one is no manifest.
    """
    location = at_home(location)
    places = [location]
    if not is_remote(location):
        below = local_path(location).glob(f"*/{MANIFEST_NAME}")
        places = [str(one.absolute()) for one in (local_path(location), *sorted(below))]
    found = []
    for place in places:
        try:
            found.append(load_corpus(place))
        except FileNotFoundError:
            continue
    return found


def _shown(source: Manifest, key: str) -> tuple[str, object]:
    """Name and value of a field for a message; a tokenizer's hash has the tokenizer's name."""
    if key != "tokenizer_sha256":
        return key, getattr(source, key)
    # With the beginning of the hash, since many files have one name.
    digits = one_line(source.tokenizer_sha256[:_SHOWN_DIGITS])
    return "tokenizer", f"{source.tokenizer} (sha256 {digits}...)"
