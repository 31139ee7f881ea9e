"""`manifest.json`: the description of a folder of shards, with sizes and hashes."""

import dataclasses
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longhaul.datamodules.urls import MissingInputError, is_remote, local_path, read_remote, sibling

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 1
# Names may come from a remote file, and are inserted into paths and `pipe:` commands.
_SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


@dataclass(frozen=True, kw_only=True)
class ShardEntry:
    """The entry of one shard."""

    name: str
    """File name beside the manifest."""
    bytes: int
    """Size of the file."""
    documents: int
    """Number of documents in it."""
    sha256: str
    """SHA-256 of the whole file, in hexadecimal."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A set of shards with documents of one length and one tokenizer."""

    format_version: int = FORMAT_VERSION
    """Version of the format of this file and the shards."""
    tokenizer: str
    """`bytes`, `gpt2`, `longcrawl64`, or the name of a tokenizer.json in the same folder."""
    tokenizer_sha256: str
    """Hash of the tokenizer. Equal hashes mean equal ids."""
    vocab_size: int
    """Number of ids: every id is below it."""
    bos_id: int
    """The id put in front of every window."""
    eot_id: int
    """The id that ends a text."""
    document_tokens: int
    """Length of every document, in tokens."""
    dtype: str
    """`uint16` or `uint32`: the type in which tokens are stored."""
    dropped_tokens: int = 0
    """Tokens at the end of the source that did not fill a document."""
    source: dict[str, Any] = field(default_factory=dict)
    """The source and the options of the preparation; it only resumes with equal ones."""
    shards: tuple[ShardEntry, ...]
    """In the order they were written."""
    location: str = field(default="", compare=False)
    """Path or URL that the manifest was read from; not part of the file."""

    def __post_init__(self) -> None:
        names = [shard.name for shard in self.shards]
        if self.format_version != FORMAT_VERSION:
            self._refuse("format_version", self.format_version, str(FORMAT_VERSION))
        if self.dtype not in ("uint16", "uint32"):
            self._refuse("dtype", self.dtype, "uint16 or uint32")
        if self.document_tokens < 1:
            self._refuse("document_tokens", self.document_tokens, "1 or more")
        if not 0 <= self.bos_id < self.vocab_size:
            self._refuse("bos_id", self.bos_id, f"0 to {self.vocab_size - 1}")
        if not 0 <= self.eot_id < self.vocab_size:
            self._refuse("eot_id", self.eot_id, f"0 to {self.vocab_size - 1}")
        if len(set(names)) != len(names):
            self._refuse("shards", f"{len(names) - len(set(names))} repeated names", "each once")
        for shard in self.shards:
            if not _SAFE_NAME.fullmatch(shard.name):
                self._refuse("shards", repr(shard.name), "a plain file name")
            if shard.documents < 1:
                self._refuse(f"documents of {shard.name}", shard.documents, "1 or more")
        if not _SAFE_NAME.fullmatch(self.tokenizer):
            self._refuse("tokenizer", repr(self.tokenizer), "a tokenizer or a plain file name")

    def _refuse(self, key: str, found: object, wanted: str) -> None:
        raise ValueError(f"{self.location or 'manifest'}: {key} is {found}, wanted {wanted}")

    @property
    def num_documents(self) -> int:
        """Documents in all shards."""
        return sum(shard.documents for shard in self.shards)

    @property
    def num_tokens(self) -> int:
        """Tokens in all shards."""
        return self.num_documents * self.document_tokens

    def url_of(self, name: str) -> str:
        """Path or URL of a file in the same folder as the manifest."""
        return sibling(self.location, MANIFEST_NAME, name)

    def save(self, folder: Path) -> Path:
        """Write `folder/manifest.json` atomically."""
        content = dataclasses.asdict(self)
        del content["location"]
        path = folder / MANIFEST_NAME
        temporary = folder / f".{MANIFEST_NAME}.tmp"
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        return path


def load_manifest(location: str | Path) -> Manifest:
    """Read the manifest at a path or URL, which may also be that of its folder.

    The URL of a shard is the URL of the manifest with `manifest.json` replaced by the name of the
    shard. So `pipe:aws s3 cp s3://bucket/train/manifest.json -` works as well as https.
    """
    location = str(location)
    if is_remote(location):
        if MANIFEST_NAME not in location:
            location = f"{location.rstrip('/')}/{MANIFEST_NAME}"
        text = read_remote(location)
    else:
        path = local_path(location)
        path = path / MANIFEST_NAME if path.is_dir() else path
        location = str(path.absolute())
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            raise MissingInputError(
                f"{path}: no such manifest; `longhaul prepare` writes one into the folder of shards"
            ) from None
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{location}: not a manifest, {error}") from None
    return _from_json(content, location)


def _from_json(content: object, location: str) -> Manifest:
    values = _checked(Manifest, content, location)
    shards = content["shards"] if isinstance(content, dict) else ()
    entries = tuple(
        ShardEntry(**_checked(ShardEntry, shard, f"{location}: shard {number}"))
        for number, shard in enumerate(shards)
    )
    return Manifest(**{**values, "shards": entries, "location": location})


def _checked(kind: type, content: object, where: str) -> dict[str, Any]:
    """The values of the fields of dataclass `kind`, with checked types; other keys are ignored."""
    if not isinstance(content, dict):
        raise ValueError(f"{where}: found {type(content).__name__}, wanted an object")
    json_types: dict[object, type] = {int: int, str: str, dict[str, Any]: dict}
    values = {}
    for item in dataclasses.fields(kind):
        if item.name == "location":
            continue
        if item.name not in content:
            raise ValueError(f"{where}: has no `{item.name}`")
        value = content[item.name]
        wanted = json_types.get(item.type, list)
        if not isinstance(value, wanted) or isinstance(value, bool):
            raise ValueError(f"{where}: {item.name} is {value!r}, wanted {wanted.__name__}")
        values[item.name] = value
    return values
