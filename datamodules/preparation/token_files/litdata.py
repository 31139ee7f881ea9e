"""LitData: index.json, and chunks of items, which are the tokens of one text each.

A chunk is the number of items, their offsets, and the items. Those that TokensLoader wrote are
tokens alone; others are the sizes (`<u4`) of their leaves, and then the leaves.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from longhaul.datamodules.files.untrusted import (
    Count,
    InnerPath,
    inner_path,
    parse_json,
    read_regular,
    shown,
)
from longhaul.datamodules.preparation.token_files.packed import Packed
from longhaul.datamodules.preparation.token_files.sources import Items
from longhaul.datamodules.preparation.token_files.stored import Batch, gathered, unsigned
from longhaul.datamodules.shards import Tokens

_MOST_INDEX_BYTES = 256 << 20
_TENSORS = {11: "u1", 12: "i1", 13: "i2", 14: "i2", 15: "i4", 16: "i4", 17: "i8", 18: "i8"}
_TENSORS[20] = "u2"
_ARRAYS = dict(enumerate(("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")))
_TYPES = {"no_header_tensor": _TENSORS, "no_header_numpy": _ARRAYS}


@dataclass(frozen=True)
class _Chunk:
    filename: InnerPath
    chunk_bytes: Count
    chunk_size: Count


@dataclass(frozen=True)
class _Config:
    data_format: list[str] | None
    compression: str | None = None
    compression_level: str | None = None
    ipc_compression: str | None = None
    encryption: object = None
    item_loader: str = "PyTreeLoader"


@dataclass(frozen=True)
class _Index:
    chunks: Annotated[list[_Chunk], Field(min_length=1)]
    config: _Config


@dataclass(frozen=True)
class LitData(Items):
    """One chunk."""

    name: str
    files: tuple[Path, ...]
    packed: Packed
    dtype: np.dtype
    leaves: int
    """Of an item; 0: the item is the tokens alone."""
    leaf: int
    items: int
    unit = "item"

    def batches(self) -> Iterator[Batch]:
        return gathered(self._items())

    def _items(self) -> Iterator[Tokens]:
        number = 0
        for number, item in enumerate(self.packed.items(), start=1):
            content = item
            if self.leaves:
                head = 4 * self.leaves
                sizes = np.frombuffer(item[:head], "<u4").tolist() if len(item) >= head else []
                if head + sum(sizes) != len(item) or not sizes:
                    raise ValueError(
                        f"{self.files[0]}: item {number:,}: found {len(item):,} bytes, wanted the "
                        f"sizes of {self.leaves} leaves and these"
                    )
                start = head + sum(sizes[: self.leaf])
                content = item[start : start + sizes[self.leaf]]
            if len(content) % self.dtype.itemsize:
                raise ValueError(
                    f"{self.files[0]}: item {number:,}: found {len(content):,} bytes, wanted a "
                    f"multiple of {self.dtype.itemsize}"
                )
            yield unsigned(np.frombuffer(content, self.dtype))
        if number != self.items:
            raise ValueError(
                f"{self.files[0]}: found {number:,} items, wanted {self.items:,} (index.json)"
            )


def open_litdata(name: str, folder: Path) -> list[Items]:
    """The chunks of a folder. ValueError where one is damaged, missing, or holds no tokens."""
    where = folder / "index.json"
    index = parse_json(_Index, read_regular(where, _MOST_INDEX_BYTES), where)
    config = index.config
    if config.encryption is not None:
        raise ValueError(f"{where}: found encrypted chunks, wanted them decrypted")
    if config.compression_level not in (None, "chunk") or config.ipc_compression is not None:
        raise ValueError(
            f"{where}: found compression within chunks, wanted none, or whole chunks "
            '(compression_level="chunk")'
        )
    leaves = config.data_format or []
    chosen = [number for number, kind in enumerate(leaves) if kind.partition(":")[0] in _TYPES]
    if len(chosen) != 1:
        raise ValueError(
            f"{where}: found items of {shown(leaves)}, wanted one array of tokens in each"
        )
    kind, _, code = leaves[chosen[0]].partition(":")
    dtype = _TYPES[kind].get(int(code) if code.isdecimal() else -1)
    if dtype is None:
        raise ValueError(f"{where}: found items of {shown(leaves)}, wanted whole numbers")
    if config.item_loader not in ("TokensLoader", "PyTreeLoader"):
        raise ValueError(
            f"{where}: found item_loader {shown(config.item_loader)}, wanted TokensLoader or "
            "PyTreeLoader"
        )
    is_bare = config.item_loader == "TokensLoader"
    codec = config.compression.partition(":")[0] if config.compression is not None else None
    found: list[Items] = []
    for chunk in index.chunks:
        path = inner_path(folder, chunk.filename)
        # Whether `chunk_bytes` counts the offsets too is left open.
        packed = Packed(path, codec, most=chunk.chunk_bytes + 4 * (chunk.chunk_size + 2))
        packed.check()
        found.append(
            LitData(
                f"{name}/{chunk.filename}" if name else chunk.filename,
                (path,),
                packed,
                np.dtype(f"<{dtype}"),
                0 if is_bare else len(leaves),
                chosen[0],
                chunk.chunk_size,
            )
        )
    return found
