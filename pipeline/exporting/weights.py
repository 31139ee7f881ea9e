"""Writes the weights of a checkpoint into safetensors shards, some rows of a tensor at a time.

A tensor of more than 8 MB is never in memory as a whole, unless it is to be transposed.
"""

import json
import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longhaul.pipeline.architectures.architecture import Place
from longhaul.pipeline.checkpoints.reader import SavedCheckpoint
from longhaul.pipeline.checkpoints.tensor_header import DTYPES
from longhaul.pipeline.runs.exported import WEIGHTS, WEIGHTS_INDEX

_BLOCK_BYTES = 8 << 20
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write_shards(
    folder: Path, saved: SavedCheckpoint, places: Mapping[str, Place], shard_bytes: int
) -> list[Path]:
    """Write tensors in order, in files of at most `shard_bytes` unless one tensor is larger.

    Args:
        places: for the name of each written tensor, the rows of the model's that it consists of.

    Raises:
        OSError: a file could not be written, or the checkpoint could not be read.
    """
    sizes = {name: _num_bytes(saved, place) for name, place in places.items()}
    shards: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if shards[-1] and used + size > shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    files = [WEIGHTS]
    if len(shards) > 1:
        count = len(shards)
        files = [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
        weight_map = {name: file for file, held in zip(files, shards, strict=True) for name in held}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (folder / WEIGHTS_INDEX).write_text(json.dumps(index, indent=2) + "\n")
    for file, shard in zip(files, shards, strict=True):
        _write_shard(folder / file, saved, {name: places[name] for name in shard})
    return [folder / file for file in files]


def _write_shard(path: Path, saved: SavedCheckpoint, places: Mapping[str, Place]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, place in places.items():
        dtype, shape = _saved(saved, place)
        span = [end, end + _num_bytes(saved, place)]
        header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": shape, "data_offsets": span}
        end = span[1]
    content = json.dumps(header).encode()
    content += b" " * (-len(content) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(content)) + content)
        for place in places.values():
            for block in _blocks(saved, place):
                file.write(block.reshape(-1).view(torch.uint8).numpy().data)


def _saved(saved: SavedCheckpoint, place: Place) -> tuple[torch.dtype, tuple[int, ...]]:
    """The dtype and the shape of a tensor as it is written."""
    whole = saved.tensors[f"model/{place.name}"]
    return whole.dtype, place.shape(whole.size)


def _num_bytes(saved: SavedCheckpoint, place: Place) -> int:
    dtype, shape = _saved(saved, place)
    return math.prod(shape) * dtype.itemsize


def _blocks(saved: SavedCheckpoint, place: Place) -> Iterator[Tensor]:
    """Yield the numbers of a tensor as it is written, some rows at a time."""
    name = f"model/{place.name}"
    whole = saved.tensors[name]
    if place.is_transposed or not whole.size:
        tensor = saved.read_one(name)
        yield tensor.T if place.is_transposed else tensor
        return
    row_bytes = math.prod(whole.size[1:]) * whole.dtype.itemsize
    step = max(1, _BLOCK_BYTES // max(1, row_bytes))
    for part in place.rows:
        rows = range(whole.size[0])[slice(*part)]
        for first in range(0, len(rows), step):
            yield saved.read_rows(name, rows[first : first + step])
