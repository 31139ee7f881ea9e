"""Copies the weights of a checkpoint into safetensors shards, a few megabytes at a time.

A checkpoint's files are safetensors too, so a tensor's bytes are copied unchanged, from the shards
of any number of ranks: nothing is unpickled, and no tensor is ever in memory as a whole, unless it
is to be transposed.
"""

import itertools
import json
import math
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from longhaul.datamodules.files.untrusted import one_line
from longhaul.pipeline.architectures.architecture import Place
from longhaul.pipeline.checkpoints.integrity import CheckpointError
from longhaul.pipeline.checkpoints.tensor_header import FLOATING_POINT, ITEM_BYTES, read_header
from longhaul.pipeline.runs.exported import WEIGHTS, WEIGHTS_INDEX

_BLOCK_BYTES = 8 << 20


@dataclass(frozen=True)
class _RankShard:
    """One rank's shard of a tensor: a block of it in a file of the checkpoint."""

    file: Path
    start: int  # byte in the file at which the block begins
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass
class SavedTensor:
    """Where the bytes of a tensor are in a checkpoint."""

    dtype: str  # as safetensors writes it
    rank_shards: list[_RankShard] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        ends = [
            [o + n for o, n in zip(shard.offset, shard.shape, strict=True)]
            for shard in self.rank_shards
        ]
        return tuple(map(max, zip(*ends, strict=True)))

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def byte_ranges(self) -> Iterator[tuple[Path, int, int, int]]:
        """Contiguous ranges of bytes: file, start in the file, start in the tensor, length."""
        item, whole = ITEM_BYTES[self.dtype], self.shape
        strides = [math.prod(whole[d + 1 :]) * item for d in range(len(whole))]
        for shard in self.rank_shards:
            # Dimensions from `last` on are contiguous, since all after `last` are complete.
            last = len(whole) - 1
            while last > 0 and shard.shape[last] == whole[last]:
                last -= 1
            length = math.prod(shard.shape[last:]) * item
            rows = itertools.product(*map(range, shard.shape[:last]))
            for number, row in enumerate(rows):
                at = [o + r for o, r in zip(shard.offset, (*row, 0), strict=False)]
                target = sum(a * stride for a, stride in zip(at, strides, strict=False))
                yield shard.file, shard.start + number * length, target, length


@dataclass(frozen=True)
class SavedRows:
    """A tensor of rows of one that is saved: where its bytes are.

    A transposed one is of all rows, and is read as a whole.
    """

    whole: SavedTensor
    place: Place

    @property
    def dtype(self) -> str:
        return self.whole.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.place.shape(self.whole.shape)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def byte_ranges(self) -> Iterator[tuple[Path, int, int, int]]:
        """As of SavedTensor."""
        count, *others = self.whole.shape
        row = math.prod(others) * ITEM_BYTES[self.dtype]
        ranges, done = list(self.whole.byte_ranges()), 0
        for part in self.place.rows:
            numbers = range(count)[slice(*part)]
            begin, end = numbers.start * row, numbers.stop * row
            for file, source, target, length in ranges:
                first, last = max(target, begin), min(target + length, end)
                if first < last:
                    yield file, source + first - target, done + first - begin, last - first
            done += end - begin

    def transposed(self) -> bytes:
        """The bytes of the transposed tensor."""
        content = bytearray(self.num_bytes)
        for file, source, target, length in self.whole.byte_ranges():
            with file.open("rb") as opened:
                opened.seek(source)
                content[target : target + length] = _read(opened, length)
        numbers = np.frombuffer(content, f"u{ITEM_BYTES[self.dtype]}")
        return numbers.reshape(self.whole.shape).T.tobytes()


Source = SavedTensor | SavedRows
"""What a tensor of an exported folder is copied from."""


def saved_tensors(checkpoint: Path, files: Iterable[str], group: str) -> dict[str, SavedTensor]:
    """The tensors of a group in these files of a checkpoint, by their names within the group.

    Raises:
        CheckpointError: a tensor is incomplete, or has an unknown type.
    """
    tensors: dict[str, SavedTensor] = {}
    for file in sorted(files):
        if not file.startswith(f"{group}-"):
            continue
        try:
            header = read_header(checkpoint / file)
            offsets = header.offsets()
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"checkpoint {checkpoint} cannot be read: {one_line(error)}"
            ) from error
        for name, entry in header.tensors.items():
            tensor = tensors.setdefault(name.removeprefix(f"{group}/"), SavedTensor(entry.dtype))
            others = [len(shard.shape) for shard in tensor.rank_shards[:1]]
            if (entry.dtype, [len(entry.shape)]) != (tensor.dtype, others or [len(entry.shape)]):
                raise CheckpointError(
                    f"checkpoint {checkpoint}: found shards of different types or numbers of "
                    f"dimensions for {name}, wanted equal ones"
                )
            begin = header.start + entry.data_offsets[0]
            shape = tuple(entry.shape)
            tensor.rank_shards.append(_RankShard(header.path, begin, offsets[name], shape))
    for name, tensor in tensors.items():
        found = sum(math.prod(shard.shape) for shard in tensor.rank_shards)
        if tensor.dtype not in FLOATING_POINT or found != math.prod(tensor.shape):
            raise CheckpointError(
                f"checkpoint {checkpoint}: found {found} numbers of type {tensor.dtype} for "
                f"{name}, wanted {math.prod(tensor.shape)} of a floating-point type"
            )
    return tensors


def write_shards(folder: Path, tensors: Mapping[str, Source], shard_bytes: int) -> list[Path]:
    """Write the tensors in order, in files of at most `shard_bytes` unless one tensor is larger.

    Raises:
        OSError: a file could not be written.
    """
    shards: list[dict[str, Source]] = [{}]
    for name, tensor in tensors.items():
        used = sum(one.num_bytes for one in shards[-1].values())
        if shards[-1] and used + tensor.num_bytes > shard_bytes:
            shards.append({})
        shards[-1][name] = tensor
    names = [WEIGHTS]
    if len(shards) > 1:
        count = len(shards)
        names = [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
        weight_map = {k: name for name, shard in zip(names, shards, strict=True) for k in shard}
        size = sum(tensor.num_bytes for tensor in tensors.values())
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (folder / WEIGHTS_INDEX).write_text(json.dumps(index, indent=2) + "\n")
    for name, shard in zip(names, shards, strict=True):
        _write_shard(folder / name, shard)
    return [folder / name for name in names]


def _write_shard(path: Path, tensors: Mapping[str, Source]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        span = [end, end + tensor.num_bytes]
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": span}
        end = span[1]
    content = json.dumps(header).encode()
    content += b" " * (-len(content) % 8)
    begin = 8 + len(content)
    with path.open("wb") as target:
        target.write(struct.pack("<Q", len(content)) + content)
        target.truncate(begin + end)
        for block, at in _blocks(header, tensors, begin):
            target.seek(at)
            target.write(block)


def _blocks(
    header: Mapping[str, Any], tensors: Mapping[str, Source], begin: int
) -> Iterator[tuple[bytes, int]]:
    """Blocks of bytes of all tensors, and the position of each in the shard."""
    by_file: dict[Path, list[tuple[int, int, int]]] = defaultdict(list)
    for name, tensor in tensors.items():
        if isinstance(tensor, SavedRows) and tensor.place.is_transposed:
            yield tensor.transposed(), begin + header[name]["data_offsets"][0]
            continue
        for file, source, target, length in tensor.byte_ranges():
            by_file[file].append((source, begin + header[name]["data_offsets"][0] + target, length))
    for file, ranges in by_file.items():
        with file.open("rb") as opened:
            for source, target, length in ranges:
                opened.seek(source)
                for done in range(0, length, _BLOCK_BYTES):
                    yield _read(opened, min(_BLOCK_BYTES, length - done)), target + done


def _read(file: BinaryIO, size: int) -> bytes:
    block = file.read(size)
    if len(block) != size:
        raise CheckpointError(
            f"{file.name}: found its end, wanted {size - len(block):,} bytes more"
        )
    return block
