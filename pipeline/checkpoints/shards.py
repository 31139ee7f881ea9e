"""Where the numbers of a checkpoint's tensors are: in which files, and for which part of a tensor.

The files' headers say it. Those of 1,024 ranks with 777 tensors each are 139 MB, and take a process
14 s. So each rank reads the headers of the files that it verifies, and the first one puts them
together as arrays, which all get.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from longhaul.datamodules.files.untrusted import shown
from longhaul.pipeline.checkpoints.tensor_header import DTYPES, TensorHeader

Part = tuple[slice, ...]


class Shard(NamedTuple):
    """A block of a tensor, in the file at this position of the checkpoint's list."""

    file: int
    dtype: str  # as safetensors writes it
    offset: tuple[int, ...]
    size: tuple[int, ...]


@dataclass(frozen=True)
class Shards:
    """All n shards of a tensor of d dimensions."""

    dtype: torch.dtype
    size: torch.Size
    """Of the whole tensor."""
    files: NDArray[np.int64]
    """(n,): the position of each shard's file."""
    begins: NDArray[np.int64]
    """(n, d): where each shard begins in the tensor."""
    ends: NDArray[np.int64]
    """(n, d): where it ends."""

    def within(
        self, offset: Sequence[int], size: Sequence[int]
    ) -> Iterator[tuple[int, Part, Part]]:
        """The shards that have numbers of a block: file, part of the shard, part of the block."""
        first = np.asarray(offset, dtype=np.int64)
        begins = np.maximum(self.begins, first)
        ends = np.minimum(self.ends, first + np.asarray(size, dtype=np.int64))
        for n in np.flatnonzero((begins < ends).all(axis=1)):
            in_shard = _part(begins[n] - self.begins[n], ends[n] - self.begins[n])
            yield int(self.files[n]), in_shard, _part(begins[n] - first, ends[n] - first)


def shards_of(file: int, header: TensorHeader) -> dict[str, Shard]:
    """The shards that a file holds, by the names of their tensors. ValueError as of `offsets`."""
    offsets = header.offsets()
    return {
        name: Shard(file, entry.dtype, offsets[name], tuple(entry.shape))
        for name, entry in header.tensors.items()
    }


def merge(found: Iterable[Mapping[str, Shard]]) -> dict[str, Shards]:
    """All tensors, whose shards are in these files.

    Raises:
        ValueError: the shards of a tensor differ in type or number of dimensions, or are not as
            many numbers as the tensor. That shards overlap is not looked for.
    """
    by_name: dict[str, list[Shard]] = defaultdict(list)
    for in_file in found:
        for name, shard in in_file.items():
            by_name[name].append(shard)
    return {name: _whole(name, shards) for name, shards in by_name.items()}


def _whole(name: str, shards: Sequence[Shard]) -> Shards:
    kinds = {(shard.dtype, len(shard.size)) for shard in shards}
    if len(kinds) > 1:
        raise ValueError(
            f"found shards of different types or numbers of dimensions for {shown(name)}, wanted "
            "equal ones"
        )
    ((dtype, dimensions),) = kinds
    # Sums of numbers that a file may choose: Python's do not wrap.
    size = [max(s.offset[d] + s.size[d] for s in shards) for d in range(dimensions)]
    numbers = sum(math.prod(shard.size) for shard in shards)
    if numbers != math.prod(size):
        raise ValueError(
            f"found {numbers} numbers for {shown(name)}, wanted {shown(math.prod(size))}"
        )
    files, _, offsets, sizes = zip(*shards, strict=True)
    begins = np.array(offsets, dtype=np.int64).reshape(len(shards), dimensions)
    ends = begins + np.array(sizes, dtype=np.int64).reshape(begins.shape)
    return Shards(DTYPES[dtype], torch.Size(size), np.array(files), begins, ends)


def _part(begin: NDArray[np.int64], end: NDArray[np.int64]) -> Part:
    return tuple(map(slice, begin.tolist(), end.tolist()))
