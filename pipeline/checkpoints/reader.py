"""Reads a checkpoint's tensors, on any number of ranks."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from longhaul.datamodules.files.untrusted import one_line, parse_json, read_regular
from longhaul.pipeline.checkpoints.integrity import (
    STATE,
    CheckpointError,
    Contents,
    reason,
    verify,
)
from longhaul.pipeline.checkpoints.shards import Part
from longhaul.pipeline.checkpoints.together import gather

_State = TypeVar("_State")
_MOST_STATE_BYTES = 4 << 20
_Block = tuple[Sequence[int], Tensor]  # where it begins in the whole tensor, and its numbers


class SavedCheckpoint:
    """An intact checkpoint, from which any of its tensors can be read."""

    def __init__(
        self,
        path: Path,
        *groups: str,
        rank_group: dist.ProcessGroup | None = None,
        verified: Contents | None = None,
    ) -> None:
        """Verify the checksums of the groups of tensors that will be read.

        Args:
            path: a checkpoint folder.
            groups: such as "model". None given means all.
            rank_group: process group of the ranks that verify and read together. None for one
                process.
            verified: what `verify` has just returned to the caller.

        Raises:
            CheckpointError: naming the file that is missing or damaged.
        """
        self.path = path
        self._rank_group = rank_group
        contents = verified or verify(path, groups or None, rank_group)
        self._files, self.tensors = contents.files, contents.tensors

    def state(self, schema: type[_State]) -> _State:
        """What the checkpoint holds beside tensors. CheckpointError if it is something else."""
        try:
            return parse_json(schema, read_regular(self.path / STATE, _MOST_STATE_BYTES), STATE)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"checkpoint {self.path} cannot be read: {one_line(error)}"
            ) from error

    def check_group(self, group: str, wanted: Mapping[str, Tensor]) -> None:
        """Raise CheckpointError unless a group has tensors of these names and shapes, and no more.

        Args:
            group: such as "model".
            wanted: tensors by name without the prefix GROUP/.
        """
        found = {name for name in self.tensors if name.startswith(f"{group}/")}
        shapes = {f"{group}/{name}": tensor.shape for name, tensor in wanted.items()}
        for name in sorted(found | shapes.keys()):
            self._check_shape(name, shapes.get(name))
            dtype = self.tensors[name].dtype
            if not dtype.is_floating_point:
                raise CheckpointError(
                    f"checkpoint {self.path}: found {dtype} for {name}, wanted a floating-point "
                    "type"
                )

    def read(self, into: Mapping[str, Tensor]) -> None:
        """Fill these tensors in place: a DTensor with this rank's shard, others with all values.

        Raises:
            CheckpointError: on all ranks, if one of them cannot read.
        """
        for name, tensor in into.items():
            self._check_shape(name, tensor.shape)
        self._read({name: _local(tensor) for name, tensor in into.items()})

    def _read(self, blocks: Mapping[str, _Block]) -> None:
        cause = None
        try:
            self._read_shards(blocks)
        except Exception as error:  # whatever safetensors says of a file that is gone
            cause = reason(error)
        causes = enumerate(gather(self._rank_group, cause))
        failed = [(rank, one) for rank, one in causes if one is not None]
        if failed:
            rank, cause = failed[0]
            where = f"rank {rank}: " if len(failed) > 1 or rank else ""
            raise CheckpointError(f"checkpoint {self.path} cannot be read: {where}{cause}")

    def _read_shards(self, blocks: Mapping[str, _Block]) -> None:
        """Fill this process's block of each tensor, file by file."""
        copies: dict[int, list[tuple[str, Part, Tensor]]] = defaultdict(list)
        for name, (offset, block) in blocks.items():
            for file, in_shard, in_block in self.tensors[name].within(offset, block.shape):
                copies[file].append((name, in_shard, block[in_block]))
        for file, parts in copies.items():
            with safe_open(self.path / self._files[file], framework="pt") as opened:
                for name, in_shard, target in parts:
                    part = opened.get_slice(name)[in_shard]
                    # A file that was replaced may have fewer numbers, which copy_ would repeat.
                    if part.shape != target.shape:
                        raise ValueError(
                            f"{self._files[file]}: found {_shape(part.shape)} for a part of "
                            f"{name}, wanted {_shape(target.shape)}"
                        )
                    target.copy_(part)

    def read_one(self, name: str) -> Tensor:
        """One full tensor, on the CPU."""
        tensor = self.empty(name)
        self.read({name: tensor})
        return tensor

    def read_rows(self, name: str, rows: range) -> Tensor:
        """Consecutive rows of a tensor, on the CPU."""
        whole = self.tensors[name]
        block = torch.empty(len(rows), *whole.size[1:], dtype=whole.dtype)
        self._read({name: ((rows.start, *(0 for _ in whole.size[1:])), block)})
        return block

    def empty(self, name: str) -> Tensor:
        """Uninitialised memory for one full tensor, on the CPU."""
        if name not in self.tensors:
            raise CheckpointError(f"checkpoint {self.path}: found no {name}, wanted one")
        entry = self.tensors[name]
        return torch.empty(entry.size, dtype=entry.dtype)

    def read_group(self, group: str) -> dict[str, Tensor]:
        """All full tensors of a group, on the CPU, by name without the prefix GROUP/."""
        full = {name: self.empty(name) for name in self.tensors if name.startswith(f"{group}/")}
        self.read(full)
        return {name.removeprefix(f"{group}/"): tensor for name, tensor in full.items()}

    def _check_shape(self, name: str, wanted: torch.Size | None) -> None:
        found = self.tensors[name].size if name in self.tensors else None
        if found != wanted:
            raise CheckpointError(
                f"checkpoint {self.path}: found {_shape(found)} for {name}, wanted {_shape(wanted)}"
            )


def _local(tensor: Tensor) -> _Block:
    """What this process has of a tensor, and where in the tensor it begins."""
    whole: Any = tensor.detach()
    # Only a DTensor has it, whose class would take a second to import.
    if not hasattr(whole, "__create_chunk_list__"):
        return (0,) * whole.ndim, whole
    (block,) = whole.__create_chunk_list__()
    return block.offsets, whole.to_local()


def _shape(size: torch.Size | None) -> str:
    return "nothing" if size is None else f"shape {tuple(size)}"
