"""`manifest.json`: the description of a folder of shards, with sizes and hashes."""

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import FailFast, Field

from longhaul.datamodules.files.atomic import write_atomically
from longhaul.datamodules.files.untrusted import (
    Count,
    PlainName,
    Positive,
    Sha256,
    parse_json,
    read_regular,
)
from longhaul.datamodules.remote.reading import read_remote
from longhaul.datamodules.urls import MissingInputError, inside, is_remote, local_path, sibling

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 2
_READ_VERSIONS = (1, FORMAT_VERSION)
# Room for 300,000 shards.
_MOST_BYTES = 64 << 20
# Indices of tokens are int64.
_MOST_TOKENS = 1 << 62

TokenId = Annotated[int, Field(ge=0, lt=1 << 32)]


@dataclass(frozen=True, kw_only=True)
class ShardEntry:
    """The entry of one shard."""

    name: PlainName
    """File name beside the manifest."""
    bytes: Positive
    """Size of the file."""
    documents: Positive
    """Number of blocks in it. The file's key is older than that word."""
    sha256: Sha256
    """SHA-256 of the whole file, in hexadecimal."""


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """Documents left out for one reason, whole or in part."""

    documents: Count
    """Documents that have lost tokens."""
    tokens: Count
    """Tokens lost, without the ids that end documents."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A set of shards with blocks of one length and one tokenizer."""

    format_version: int = FORMAT_VERSION
    """Version of the format of this file and the shards."""
    tokenizer: PlainName
    """`bytes`, `gpt2`, `longcrawl64`, or the name of a tokenizer.json in the same folder."""
    tokenizer_sha256: Annotated[str, Field(max_length=128)]
    """Hash of the tokenizer. Equal hashes mean equal ids."""
    vocab_size: Annotated[int, Field(ge=1, le=1 << 32)]
    """Number of ids: every id is below it."""
    bos_id: TokenId
    """The id put in front of every window."""
    eot_id: TokenId
    """The id that ends a text."""
    document_tokens: Annotated[int, Field(ge=1, le=1 << 40)]
    """Length of every block, in tokens. The file's key is older than that word."""
    dtype: Literal["uint16", "uint32"]
    """The type in which tokens are stored."""
    boundaries: Literal["none", "ends"] = "none"
    """`ends`: the shards hold the ends of the documents in each block. `none`: they are not known.
    Manifests of version 1 have no such key."""
    dropped_tokens: Count = 0
    """Tokens at the end of the source that did not fill a block."""
    empty_texts: Count = 0
    """Texts of the source without a token, which were skipped."""
    dropped: Annotated[dict[str, Dropped], Field(max_length=1000)] = field(default_factory=dict)
    """What options of the preparation have left out, by reason."""
    source: dict[str, Any] = field(default_factory=dict)
    """The source and the options of the preparation; it only resumes with equal ones."""
    shards: Annotated[tuple[ShardEntry, ...], Field(min_length=1), FailFast()]
    """In the order they were written."""
    location: str = field(default="", compare=False)
    """Path or URL that the manifest was read from; not part of the file."""

    def __post_init__(self) -> None:
        names = {shard.name for shard in self.shards}
        if self.format_version not in _READ_VERSIONS:
            wanted = " or ".join(map(str, _READ_VERSIONS))
            _refuse("format_version", self.format_version, wanted)
        for key in ("bos_id", "eot_id"):
            if getattr(self, key) >= self.vocab_size:
                _refuse(key, getattr(self, key), f"less than vocab_size = {self.vocab_size}")
        if len(names) != len(self.shards):
            repeated = len(self.shards) - len(names)
            _refuse("shards", f"{repeated} repeated names", "each name once")
        if self.num_tokens > _MOST_TOKENS:
            _refuse("shards", f"{self.num_tokens} tokens in all", f"{_MOST_TOKENS} at most")

    @property
    def num_blocks(self) -> int:
        """Blocks in all shards."""
        return sum(shard.documents for shard in self.shards)

    @property
    def num_tokens(self) -> int:
        """Tokens in all shards."""
        return self.num_blocks * self.document_tokens

    @property
    def shards_sha256(self) -> str:
        """What identifies the tokens: a hash of the hashes of all shards, in their order."""
        return hashlib.sha256("".join(shard.sha256 for shard in self.shards).encode()).hexdigest()

    def url_of(self, name: str) -> str:
        """Path or URL of a file in the same folder as the manifest."""
        return sibling(self.location, MANIFEST_NAME, name)

    def to_json(self) -> str:
        """The content of the file."""
        content = dataclasses.asdict(self)
        del content["location"]
        return json.dumps(content, indent=1) + "\n"

    def save(self, folder: Path) -> None:
        """Write `folder/manifest.json` atomically."""
        write_atomically(folder / MANIFEST_NAME, self.to_json())


def load_manifest(location: str | Path) -> Manifest:
    """Read the manifest at a path or URL, which may also be that of its folder.

    The URL of a shard is the URL of the manifest with the name of the shard in place of
    `manifest.json`, at the end of its path or in its query.
    """
    location = str(location)
    if is_remote(location):
        location = inside(location, MANIFEST_NAME)
        text = read_remote(location, _MOST_BYTES)
    else:
        path = local_path(location)
        path = path / MANIFEST_NAME if path.is_dir() else path
        location = str(path.absolute())
        try:
            text = read_regular(path, _MOST_BYTES)
        except FileNotFoundError:
            below = sorted(str(one.parent) for one in path.parent.glob(f"*/{MANIFEST_NAME}"))
            remedy = (
                f"wanted {' or '.join(below)}"
                if below and path.name == MANIFEST_NAME
                else "`longhaul prepare` writes one into the folder of shards"
            )
            raise MissingInputError(f"{path}: no such manifest; {remedy}") from None
    manifest = parse_json(Manifest, text, location)
    return dataclasses.replace(manifest, location=location)


def _refuse(key: str, found: object, wanted: str) -> None:
    raise ValueError(f"{key}: found {found}, wanted {wanted}")
