"""Writes the tensor files of a checkpoint.

Each rank writes its tensors to safetensors files named `GROUP-RRRRR-PPP.safetensors`: GROUP is what
precedes the first slash in the tensors' names, RRRRR the rank, PPP counts files. Beside them
`state.json` holds everything else, and `checksums.json` the size and sha256 of each file
(integrity.py). Reading them unpickles nothing. A file records the offset of each of its shards in
the full tensor, as torch's HuggingFaceStorageReader wants it too, so that any number of ranks can
read a checkpoint (reader.py).
"""

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from longhaul.datamodules.files.atomic import flush
from longhaul.pipeline.checkpoints.integrity import CheckpointError, checksum
from longhaul.pipeline.checkpoints.planner import bytes_of

# Largest file. Each is read back after it was written, which takes this much additional memory.
_MAX_FILE_BYTES = 1 << 29
# Of a file of `write_in_turn`, whose tensors are in memory together, unless one is larger.
_MAX_BYTES_IN_TURN = 1 << 25


class CheckpointWriter(StorageWriter):
    """Writes one checkpoint for torch.distributed.checkpoint. `begin` and `end` run on rank 0."""

    def __init__(
        self,
        folder: Path,
        *,
        begin: Callable[[], None],
        end: Callable[[Mapping[str, Any]], None],
    ) -> None:
        """Prepare to write one checkpoint.

        Args:
            folder: where the files are written; `begin` creates it.
            begin: called before any tensor is written.
            end: called with the size and sha256 of every file, by name, when all are on disk.
        """
        super().__init__()
        self.folder = folder
        self._begin, self._end = begin, end

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self._begin()
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        for name, items in _split_into_files(plan):
            tensors = {item.index.fqn: _cpu_tensor(planner.resolve_data(item)) for item in items}
            offsets = {item.index.fqn: list(item.index.offset or ()) for item in items}
            written = name, _write_tensors(self.folder / name, tensors, offsets)
            # One for each file: the first rank reads them all.
            results.append(WriteResult(items[0].index, sum(map(bytes_of, items)), written))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self._end(dict(one.storage_data for of_rank in results for one in of_rank))


def _split_into_files(plan: SavePlan) -> Iterator[tuple[str, list[WriteItem]]]:
    """The files of this rank's plan: each holds one group only, up to _MAX_FILE_BYTES."""
    groups: dict[str, list[list[WriteItem]]] = defaultdict(list)
    sizes: dict[str, int] = {}
    for item in plan.items:
        group = item.index.fqn.partition("/")[0]
        if not groups[group] or sizes[group] + bytes_of(item) > _MAX_FILE_BYTES:
            groups[group].append([])
            sizes[group] = 0
        groups[group][-1].append(item)
        sizes[group] += bytes_of(item)
    for group, files in groups.items():
        for number, items in enumerate(files):
            yield f"{group}-{plan.storage_data:05d}-{number:03d}.safetensors", items


def write_in_turn(folder: Path, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Any]:
    """Write tensors of one group that come one after the other, of which few are held at a time.

    They are whole, on the CPU, and named GROUP/NAME.

    Returns:
        The size and sha256 of every file, by name.
    """
    files: dict[str, Any] = {}
    held: dict[str, Tensor] = {}

    def write() -> None:
        group = next(iter(held)).partition("/")[0]
        name = f"{group}-{0:05d}-{len(files):03d}.safetensors"
        offsets = {name: [0] * tensor.ndim for name, tensor in held.items()}
        files[name] = _write_tensors(folder / name, held, offsets)
        held.clear()

    for name, tensor in tensors:
        if held and sum(one.nbytes for one in held.values()) + tensor.nbytes > _MAX_BYTES_IN_TURN:
            write()
        held[name] = tensor.contiguous()
    write()
    return files


def _cpu_tensor(data: Any) -> Tensor:
    assert isinstance(data, Tensor)
    return data.detach().cpu().contiguous()


def _write_tensors(
    path: Path, tensors: Mapping[str, Tensor], offsets: Mapping[str, list[int]]
) -> dict[str, Any]:
    """Write a file, flush it, read it back to compare, and return its checksum."""
    sharding = {name: {"saved_offsets": offset} for name, offset in offsets.items()}
    saved = _without_shared_memory(tensors)
    # save_file makes files that only their owner can read. The run's other files follow the umask.
    path.touch()
    mode = path.stat().st_mode
    # save_file writes from the tensors' memory. Building the file's bytes first would take as much
    # memory again.
    save_file(saved, path, metadata={"format": "pt", "DCP_SHARDING_INFO": json.dumps(sharding)})
    path.chmod(mode)
    flush(path)
    back = load_file(path)
    if back.keys() != saved.keys() or not all(_equal_bits(back[k], t) for k, t in saved.items()):
        raise CheckpointError(f"{path.name} does not read back as it was written")
    return checksum(path)


def _without_shared_memory(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Clone tensors that share memory with another, because safetensors refuses to save them."""
    result: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        result[name] = tensor.clone() if storage in seen else tensor
        seen.add(storage)
    return result


def _equal_bits(a: Tensor, b: Tensor) -> bool:
    """Whether dtype, shape and every bit are equal, so that NaN equals itself."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
