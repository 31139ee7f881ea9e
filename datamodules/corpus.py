"""The tokens that a run reads: their tokenizer, number, fingerprint and order."""

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from longhaul.datamodules.config import DataConfig, ManifestKey
from longhaul.datamodules.files.atomic import write_atomically
from longhaul.datamodules.files.untrusted import PlainName, one_line, parse_json, read_regular
from longhaul.datamodules.manifest import MANIFEST_NAME, Manifest, ShardEntry, load_manifest
from longhaul.datamodules.mixture import MixtureOrder, Stage, integer_weights
from longhaul.datamodules.order import SampleOrder, StoredOrder
from longhaul.datamodules.tokenizer import (
    BUILT_IN,
    FileTokenizer,
    Tokenizer,
    build_tokenizer,
    read_tokenizer,
)
from longhaul.datamodules.urls import MissingInputError, at_home, is_remote, local_path

SOURCES_NAME = "sources.json"
"""The file in the folder of a record that names several sources, with their weights."""

# What two records of the same data have in common, beside the fingerprint.
_IDS = ("tokenizer_sha256", "vocab_size", "bos_id")
_SAME = (*_IDS, "eot_id", "document_tokens", "dtype")
_SHOWN_DIGITS = 12
_MOST_RECORD_BYTES = 16 << 20


class Corpus:
    """Blocks of tokens of one tokenizer, whatever files they are in.

    Only this class and the ShardStore that reads a source know of what kind the source is: the
    shards of a manifest. A sample's location names its source by the index in `sources`.

    Args:
        sources: the manifest of each, by its name; or one alone, whose name is "".
        stages: the shares in which several are read, in their order.

    Raises:
        ValueError: the ids of two sources do not mean the same. The message names the second.
    """

    def __init__(
        self, sources: Manifest | Mapping[str, Manifest], stages: Sequence[Stage] = ()
    ) -> None:
        if isinstance(sources, Manifest):
            sources = {"": sources}
        self.sources = tuple(sources.values())
        self.names = tuple(sources)
        self.stages = tuple(stages)
        source = self.sources[0]
        for name, other in sources.items():
            for key in (*_IDS, "eot_id"):
                if getattr(other, key) != getattr(source, key):
                    (word, found), (_, wanted) = _shown(other, key), _shown(source, key)
                    raise ValueError(
                        f"data.sources.{name}: found {word} {found}, wanted {wanted} as in "
                        f"data.sources.{self.names[0]}"
                    )
        # As documented in Manifest, for all sources together.
        self.location = ", ".join(one.location for one in self.sources)
        self.is_remote = any(is_remote(one.location) for one in self.sources)
        self.tokenizer_name = source.tokenizer
        self.tokenizer_sha256 = source.tokenizer_sha256
        self.vocab_size = source.vocab_size
        self.bos_id = source.bos_id
        self.eot_id = source.eot_id
        self.block_tokens = math.gcd(*(one.document_tokens for one in self.sources))
        """Length of the blocks; of several lengths, the largest that divides all."""
        self.has_ends = any(one.boundaries == "ends" for one in self.sources)
        """Whether the ends of documents are known in a source. In others a window is one."""
        self.num_blocks = sum(one.num_blocks for one in self.sources)
        self.num_tokens = sum(one.num_tokens for one in self.sources)
        self.dropped_tokens = sum(one.dropped_tokens for one in self.sources)
        origins = {name: one.source for name, one in sources.items()}
        self.origin = origins if self.has_names else source.source
        self.fingerprint = self.fingerprint_at(None)

    @property
    def has_names(self) -> bool:
        """Whether its sources have names, even if there is one only."""
        return self.names != ("",)

    def fingerprint_at(self, tokens: int | None) -> str:
        """What identifies the data that so many trained tokens may have read; None: all.

        Of sources with names these are their shards and weights, up to the stage of that token.
        """
        if not self.has_names:
            return self.sources[0].shards_sha256
        digests = {name: one.shards_sha256 for name, one in self._named.items()}
        if not self.stages:
            content: object = digests
        else:
            content = [
                [one.at_tokens, {name: [w, digests[name]] for name, w in one.weights.items()}]
                for one in self.stages
                if tokens is None or one.at_tokens < max(tokens, 1)
            ]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def continuing(self, earlier: "Corpus") -> "Corpus":
        """This corpus, with the stages of an earlier one before the first of its own.

        Raises:
            ValueError: a source of these stages is not there.
        """
        begin = self.stages[0].at_tokens if self.stages else 0
        before = [one for one in earlier.stages if one.at_tokens < begin]
        if missing := {name for one in before for name in one.weights} - set(self.names):
            raise ValueError(
                f"data.sources: found no {min(missing)}, which the run has read, wanted it; with "
                "data.from_tokens its weight may be 0"
            )
        return Corpus(self._named, [*before, *self.stages])

    @property
    def each(self) -> "dict[str, Corpus]":
        """Each source alone, by its name."""
        return {name: Corpus(source) for name, source in self._named.items()}

    @property
    def _named(self) -> dict[str, Manifest]:
        return dict(zip(self.names, self.sources, strict=True))

    @property
    def files(self) -> list[tuple[str, ShardEntry]]:
        """The path or URL of every shard, and its size and hash."""
        return [(one.url_of(shard.name), shard) for one in self.sources for shard in one.shards]

    @property
    def name(self) -> str:
        """The last two folders of its path or URL, such as `gpt2/train`; or its sources' names."""
        if self.has_names:
            return "+".join(self.names)
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
        source = self.sources[0]
        if self.tokenizer_name in BUILT_IN:
            tokenizer = build_tokenizer(self.tokenizer_name)
        else:
            url = source.url_of(self.tokenizer_name)
            tokenizer = read_tokenizer(url, self.tokenizer_name, bos=self.bos_id, eos=self.eot_id)
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

    def check_context(self, context: int, key: str = "data.context") -> None:
        """Raise ValueError if `context`, which was given with `key`, does not divide the blocks."""
        for source in self.sources:
            length = source.document_tokens
            if not 1 <= context <= length or length % context:
                small = [d for d in range(1, math.isqrt(length) + 1) if length % d == 0]
                divisors = [*small, *(length // d for d in small)]
                below = max((d for d in divisors if d <= context), default=1)
                raise ValueError(
                    f"{key}: {context} does not divide the blocks' {length} tokens "
                    f"({source.location}); the nearest below that does is {below}"
                )

    def training_order(
        self, context: int, seed: int, shuffle_shards: int, samples_per_update: int = 1
    ) -> SampleOrder | MixtureOrder:
        """The order in which training reads samples of `context` tokens.

        Raises:
            ValueError: the context does not divide a block, or the weights of several sources do
                not hold from the start.
        """
        self.check_context(context)

        def order_of(source: Manifest, seed: int | str) -> SampleOrder:
            blocks = [shard.documents for shard in source.shards]
            return SampleOrder(blocks, source.document_tokens // context, seed, shuffle_shards)

        if not self.has_names:
            return order_of(self.sources[0], seed)
        if self.stages[0].at_tokens > 0:
            raise ValueError(
                f"data.from_tokens: found {self.stages[0].at_tokens} in a run that has not begun, "
                "wanted null"
            )
        return MixtureOrder(
            {name: order_of(source, f"{seed}/{name}") for name, source in self._named.items()},
            self.stages,
            context=context,
            samples_per_update=samples_per_update,
            seed=seed,
        )

    def stored_order(self, context: int, samples: int | None = None) -> StoredOrder:
        """The order of validation: samples of `context` tokens as they are stored.

        Args:
            context: tokens per sample.
            samples: to read of all sources together, equally many of each; None: all there are.
        """
        self.check_context(context)
        each = None if samples is None else max(1, samples // len(self.sources))
        return StoredOrder(
            [[shard.documents for shard in source.shards] for source in self.sources],
            [source.document_tokens // context for source in self.sources],
            each,
        )

    def ids_differ(self, wanted: "Corpus") -> str:
        """An error message if token ids mean something else than in `wanted`; else empty."""
        return _difference(self.sources[0], wanted.sources[0], _IDS)

    def differs(self, wanted: "Corpus") -> str:
        """What was found and what was wanted; empty if both are the same data, perhaps moved.

        A source that only one of them has is no difference, and neither are weights.
        """
        if self.has_names != wanted.has_names:
            found, was = (
                f"the sources {', '.join(one.names)}" if one.has_names else one.location
                for one in (self, wanted)
            )
            return f"found {found}, wanted {was}"
        if difference := self.ids_differ(wanted):
            return difference
        for name, source in self._named.items():
            other = wanted._named.get(name, source)
            if difference := _difference(source, other, _SAME):
                return difference
            if source.shards_sha256 != other.shards_sha256:
                of_source = f" of {name}" if name else ""
                return (
                    f"found other shards{of_source} in {source.location}, wanted the same ones "
                    f"as in {other.location}"
                )
        return ""

    def record(self, folder: Path, *, with_tokenizer: bool) -> None:
        """Write the description of the corpus into a folder, from which `load_record` reads it.

        Args:
            folder: is made if it does not exist.
            with_tokenizer: whether the tokenizer is written too, if it is a file.

        Raises:
            OSError: a file cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer = self.load_tokenizer() if with_tokenizer else None
        for name, source in self._named.items():
            place = folder / name
            place.mkdir(exist_ok=True)
            if isinstance(tokenizer, FileTokenizer):
                write_atomically(place / self.tokenizer_name, tokenizer.content)
            source.save(place)
        if self.has_names:
            stages = [one._asdict() for one in self.stages]
            content = json.dumps({"sources": self.names, "stages": stages}, indent=1)
            write_atomically(folder / SOURCES_NAME, content + "\n")


@dataclass(frozen=True)
class _Record:
    """What RUN/data/train/sources.json holds, beside a folder with the manifest of each source."""

    sources: Annotated[tuple[PlainName, ...], Field(min_length=1)]
    """Names, in their order."""
    stages: tuple[Stage, ...]


def load_record(folder: Path) -> Corpus:
    """The corpus that `Corpus.record` has described in a folder, with the errors of it.

    Raises:
        OSError: it cannot be read; FileNotFoundError: there is none.
        ValueError: it is damaged.
    """
    file = folder / SOURCES_NAME
    try:
        content = read_regular(file, _MOST_RECORD_BYTES)
    except FileNotFoundError:
        return load_corpus(folder)
    record = parse_json(_Record, content, file)
    for stage in record.stages:
        if missing := stage.weights.keys() - set(record.sources):
            raise ValueError(f"{file}: stages: found {min(missing)}, wanted one of the sources")
    return Corpus({name: load_manifest(folder / name) for name in record.sources}, record.stages)


def corpus_of(data: DataConfig, key: ManifestKey = "manifest") -> Corpus:
    """The corpus that a key of the config names, or that key of all sources.

    Raises:
        OSError: a manifest cannot be read; FileNotFoundError: it does not exist.
        ValueError: it is no manifest, or the ids of two sources do not mean the same.
    """
    places = data.manifests(key)
    manifests = {}
    for name, place in places.items():
        try:
            manifests[name] = load_manifest(place)
        except (MissingInputError, ValueError) as error:
            if not name:
                raise
            kind = MissingInputError if isinstance(error, MissingInputError) else ValueError
            raise kind(f"data.sources.{name}: {error}") from error
    stages = []
    if key == "manifest" and data.sources:
        # Without weights the sizes, in samples, which are small numbers.
        weights = {
            name: source.num_tokens // data.context if weight is None else weight
            for name, source in manifests.items()
            for weight in (data.sources[name].weight,)
        }
        given = [(data.from_tokens or 0, weights)]
        given += [(one.at_tokens, one.weights) for one in data.schedule]
        stages = [Stage(at_tokens, integer_weights(some)) for at_tokens, some in given]
    return Corpus(manifests, stages)


def load_corpus(location: str | Path) -> Corpus:
    """The corpus that the manifest at a path or URL describes; its folder will do too.

    Raises:
        OSError: it cannot be read; FileNotFoundError: it does not exist.
        ValueError: it is no manifest.
    """
    return Corpus(load_manifest(location))


def find_corpora(location: str, levels: int = 1) -> list[Corpus]:
    """The corpus at a path or URL, or all that are in folders of a folder, so many levels deep.

    Raises:
        OSError: one cannot be read.
        ValueError: one is no manifest.
    """
    location = at_home(location)
    places = [location]
    if not is_remote(location):
        patterns = ["*/" * level + MANIFEST_NAME for level in range(1, levels + 1)]
        below = (one for some in patterns for one in sorted(local_path(location).glob(some)))
        places = [str(one.absolute()) for one in (local_path(location), *below)]
    found = []
    for place in places:
        try:
            found.append(load_corpus(place))
        except FileNotFoundError:
            continue
    return found


def _difference(ours: Manifest, theirs: Manifest, keys: Sequence[str]) -> str:
    for key in keys:
        if getattr(ours, key) != getattr(theirs, key):
            (name, now), (_, before) = _shown(ours, key), _shown(theirs, key)
            return f"found {name} {now} in {ours.location}, wanted {before} as in {theirs.location}"
    return ""


def _shown(source: Manifest, key: str) -> tuple[str, object]:
    """Name and value of a field for a message; a tokenizer's hash has the tokenizer's name."""
    if key != "tokenizer_sha256":
        return key, getattr(source, key)
    # With the beginning of the hash, since many files have one name.
    digits = one_line(source.tokenizer_sha256[:_SHOWN_DIGITS])
    return "tokenizer", f"{source.tokenizer} (sha256 {digits}...)"
