"""Reads the header of a safetensors file, which says where each tensor's bytes are.

The format: 8 bytes with the length of the header, the header as JSON, then the bytes of all
tensors. The whole header is checked against the size of the file, so that no reader of the file
can be led beyond its end, or to memory that the file does not fill.
"""

import json
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field

from longhaul.datamodules.files.untrusted import Count, open_regular, parse_json, shown

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
"""The types of a file's numbers, by the names that it has for them."""

FLOATING_POINT = ("F64", "F32", "BF16", "F16")
"""The types of weights."""

_MOST_HEADER_BYTES = 16 << 20
_MOST_DIMENSIONS = 64
_METADATA = "__metadata__"
_SHARDING = "DCP_SHARDING_INFO"


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file."""

    dtype: str
    shape: Annotated[list[Count], Field(max_length=_MOST_DIMENSIONS)]
    data_offsets: Annotated[list[Count], Field(min_length=2, max_length=2)]
    """First byte and the byte after the last, counted from the end of the header."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype: found {shown(self.dtype)}, wanted one of {', '.join(DTYPES)}")

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class _Placement:
    saved_offsets: Annotated[list[Count], Field(max_length=_MOST_DIMENSIONS)]


@dataclass(frozen=True)
class TensorHeader:
    """The header of one file."""

    path: Path
    tensors: dict[str, TensorEntry]
    metadata: dict[str, str]

    def offsets(self) -> dict[str, tuple[int, ...]]:
        """Where each tensor's first number is in the full tensor, of which this is a shard.

        Raises:
            ValueError: the header does not say it.
        """
        where = f"{self.path}: {_SHARDING}"
        if _SHARDING not in self.metadata:
            raise ValueError(f"{where}: found nothing, wanted the offsets of the tensors")
        placed = parse_json(dict[str, _Placement], self.metadata[_SHARDING], where)
        offsets: dict[str, tuple[int, ...]] = {}
        for name, entry in self.tensors.items():
            if name not in placed:
                raise ValueError(f"{where}: found nothing for {shown(name)}, wanted its offset")
            offset = tuple(placed[name].saved_offsets) or (0,) * len(entry.shape)
            if len(offset) != len(entry.shape):
                raise ValueError(
                    f"{where}: found {shown(offset)} for {shown(name)}, wanted "
                    f"{len(entry.shape)} numbers"
                )
            offsets[name] = offset
        return offsets


def read_header(path: Path) -> TensorHeader:
    """The header of a safetensors file.

    Raises:
        ValueError: it is no such file, or the header does not fit the file; it is named.
        OSError: it cannot be read.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        first = file.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
        if not 2 <= length <= min(_MOST_HEADER_BYTES, size - 8):
            raise ValueError(
                f"{path}: found a header of {length:,} bytes in a file of {size:,}, wanted the "
                "header of a safetensors file"
            )
        content = file.read(length)
    raw = parse_json(dict[str, Any], content, path)
    metadata = parse_json(
        dict[str, str], json.dumps(raw.pop(_METADATA, {})), f"{path}: {_METADATA}"
    )
    # One by one, since the list of all violations of a hostile header would take much memory.
    tensors = {
        name: parse_json(TensorEntry, json.dumps(entry), f"{path}: {shown(name)}")
        for name, entry in raw.items()
    }
    end = 0
    for name, entry in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        span = [end, end + entry.num_bytes]
        if entry.data_offsets != span:
            raise ValueError(
                f"{path}: {shown(name)}: data_offsets: found {entry.data_offsets}, wanted {span} "
                f"for {entry.dtype} of shape {shown(tuple(entry.shape))}"
            )
        end = span[1]
    if end != size - 8 - length:
        raise ValueError(f"{path}: found {size:,} bytes, wanted {8 + length + end:,}")
    return TensorHeader(path, tensors, metadata)
