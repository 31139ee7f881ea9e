"""Reads a checkpoint's tensors, on any number of ranks."""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from longhaul.datamodules.files.untrusted import one_line, parse_json, read_regular, shown
from longhaul.pipeline.checkpoints.integrity import STATE, CheckpointError, first_cause, verify
from longhaul.pipeline.checkpoints.together import gather

_State = TypeVar("_State")
_MOST_STATE_BYTES = 4 << 20


class SavedCheckpoint:
    """An intact checkpoint, from which any of its tensors can be read."""

    def __init__(
        self,
        path: Path,
        *groups: str,
        rank_group: dist.ProcessGroup | None = None,
        verified: list[str] | None = None,
    ) -> None:
        """Verify the checksums of the groups of tensors that will be read.

        Args:
            path: a checkpoint folder.
            groups: such as "model". None given means all.
            rank_group: process group of the ranks that verify and read together. None for one
                process.
            verified: names of the checkpoint's files, if the caller has just verified them all.

        Raises:
            CheckpointError: naming the file that is missing or damaged.
        """
        self.path = path
        self._rank_group = rank_group
        names = verified or verify(path, groups or None, rank_group)
        self._reader = HuggingFaceStorageReader(str(path))
        # Otherwise the reader would read all files of the folder, unverified ones included.
        self._reader.fs = _ListedFiles(names)
        self.tensors = self._read_metadata()

    def state(self, schema: type[_State]) -> _State:
        """What the checkpoint holds beside tensors. CheckpointError if it is something else."""
        return read_state(self.path, schema)

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
            dtype = self.tensors[name].properties.dtype
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
        if not into:
            return
        cause = None
        try:
            # Without the ranks' plans, which torch would gather although none depends on another.
            load(dict(into), storage_reader=self._reader, no_dist=True)
        except (Exception, CheckpointException) as error:
            cause = first_cause(error)
        causes = enumerate(gather(self._rank_group, cause))
        failed = [(rank, one) for rank, one in causes if one is not None]
        if failed:
            rank, cause = failed[0]
            where = f"rank {rank}: " if len(failed) > 1 or rank else ""
            raise CheckpointError(f"checkpoint {self.path} cannot be read: {where}{cause}")

    def read_one(self, name: str) -> Tensor:
        """One full tensor, on the CPU."""
        tensor = self.empty(name)
        self.read({name: tensor})
        return tensor

    def empty(self, name: str) -> Tensor:
        """Uninitialised memory for one full tensor, on the CPU."""
        if name not in self.tensors:
            raise CheckpointError(f"checkpoint {self.path}: found no {name}, wanted one")
        entry = self.tensors[name]
        return torch.empty(entry.size, dtype=entry.properties.dtype)

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

    def _read_metadata(self) -> dict[str, TensorStorageMetadata]:
        """Sizes and types of all tensors, whose shards must fill them."""
        try:
            whole = self._reader.read_metadata()
        except Exception as error:  # whatever torch says of headers that contradict each other
            raise CheckpointError(
                f"checkpoint {self.path} cannot be read: {one_line(error)}"
            ) from error
        # torch would read it again, and log a traceback if the checkpoint is gone by then.
        self._reader.read_metadata = lambda *_, **__: whole  # type: ignore[method-assign]
        tensors: dict[str, TensorStorageMetadata] = {}
        for name, entry in whole.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            found = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
            if found != math.prod(entry.size):
                raise CheckpointError(
                    f"checkpoint {self.path}: found {found} numbers for {shown(name)}, wanted "
                    f"{shown(math.prod(entry.size))}"
                )
            tensors[name] = entry
        return tensors


def read_state(checkpoint: Path, schema: type[_State]) -> _State:
    """What an intact checkpoint holds beside tensors, without looking at these.

    Raises:
        CheckpointError: it is something else.
    """
    try:
        return parse_json(schema, read_regular(checkpoint / STATE, _MOST_STATE_BYTES), STATE)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint {checkpoint} cannot be read: {one_line(error)}"
        ) from error


class _ListedFiles(FileSystem):
    """A file system in which a folder holds only the listed files."""

    def __init__(self, names: list[str]) -> None:
        self._names = names

    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        return [os.path.join(path, name) for name in self._names]


def _shape(size: torch.Size | None) -> str:
    return "nothing" if size is None else f"shape {tuple(size)}"
