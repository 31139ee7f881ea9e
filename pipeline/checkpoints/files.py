"""What a checkpoint folder holds, how it is written and read, and how damage is found.

Each rank writes its part of the tensors as safetensors files, `GROUP-RRRRR-PPP.safetensors` with
GROUP the part of a tensor's name before the first slash. `state.json` has everything else, and
`checksums.json`, written last, the size and sha256 of each file. Nothing in it is unpickled. A file
says of each tensor where it belongs in the whole one, the way that torch's reader of such files
expects it: a checkpoint can be read on any number of ranks.
"""

import hashlib
import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from longhaul.pipeline.system.files import flush

FORMAT = 3
CHECKSUMS = "checksums.json"
STATE = "state.json"
_TENSOR_FILE = re.compile(r"([a-z]+)-\d{5,}-\d{3,}\.safetensors")
# A file is read back after it was written, which takes this much memory beyond the tensors.
_FILE_BYTES = 1 << 29


class CheckpointError(OSError):
    """A checkpoint that could not be written or read, in one line for the user."""


@dataclass(frozen=True)
class _WrittenFile:
    """What one rank tells the one that puts its name to the checkpoint."""

    name: str
    fingerprint: dict[str, Any]


class CheckpointWriter(StorageWriter):
    """Writes one checkpoint for torch.distributed.checkpoint; rank 0 also begins and ends it."""

    def __init__(
        self,
        folder: Path,
        *,
        begin: Callable[[int], None],
        end: Callable[[Mapping[str, Any]], None],
    ) -> None:
        """Say where, and what rank 0 does before and after.

        Args:
            folder: made by `begin`.
            begin: given the bytes of all tensors, before any is written.
            end: given the size and sha256 of every file, when all are on disk.
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
        self._begin(sum(_bytes(item) for plan in plans for item in plan.items))
        return [replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        for name, items in _files(plan):
            tensors = {item.index.fqn: _plain(planner.resolve_data(item)) for item in items}
            offsets = {item.index.fqn: list(item.index.offset or ()) for item in items}
            written = _WrittenFile(name, _write_tensors(self.folder / name, tensors, offsets))
            results += [WriteResult(item.index, _bytes(item), written) for item in items]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        written = [one.storage_data for part in results for one in part]
        self._end({file.name: file.fingerprint for file in written})


def write_listing(folder: Path, state: Mapping[str, Any], files: Mapping[str, Any]) -> None:
    """Write the state, then the checksums of it and of the tensors' files."""
    files = {STATE: _write_json(folder / STATE, state), **files}
    _write_json(folder / CHECKSUMS, {"format": FORMAT, "files": files})
    flush(folder)


def verify(path: Path, only: Collection[str] | None = None) -> list[str]:
    """Compare a checkpoint's files with its checksums; the names of the files it holds.

    Args:
        path: a checkpoint folder.
        only: hash only these groups of tensors, and the state. None hashes all.

    Raises:
        CheckpointError: naming the first file that is missing or damaged.
    """
    if not path.is_dir():
        raise CheckpointError(f"checkpoint {path} is not a folder")
    try:
        listing = json.loads((path / CHECKSUMS).read_bytes())
        version, files = listing["format"], dict(listing["files"])
    except FileNotFoundError as error:
        raise CheckpointError(f"checkpoint {path} is incomplete: no {CHECKSUMS}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"checkpoint {path} is damaged: {CHECKSUMS}: {error}") from error
    if version != FORMAT:
        # A ValueError, unlike the rest: such a checkpoint is whole and must not be set aside.
        raise ValueError(f"checkpoint {path} has format {version}, this version reads {FORMAT}")
    if only is not None:
        if missing := set(only) - {_group(name) for name in files}:
            raise CheckpointError(f"checkpoint {path} has no {', '.join(sorted(missing))}")
        files = {name: entry for name, entry in files.items() if _group(name) in {*only, None}}
    for name, entry in files.items():
        try:
            found = _fingerprint(path / name)
        except OSError as error:
            raise CheckpointError(
                f"checkpoint {path} is damaged: {name}: {reason(error)}"
            ) from error
        if found != entry:
            raise CheckpointError(
                f"checkpoint {path} is damaged: {name} has {found}, {CHECKSUMS} says {entry}"
            )
    return list(files)


def _files(plan: SavePlan) -> Iterator[tuple[str, list[WriteItem]]]:
    """The files of this rank's plan, of one group each and of a bounded size."""
    groups: dict[str, list[list[WriteItem]]] = defaultdict(list)
    sizes: dict[str, int] = {}
    for item in plan.items:
        group = item.index.fqn.partition("/")[0]
        if not groups[group] or sizes[group] + _bytes(item) > _FILE_BYTES:
            groups[group].append([])
            sizes[group] = 0
        groups[group][-1].append(item)
        sizes[group] += _bytes(item)
    for group, parts in groups.items():
        for number, items in enumerate(parts):
            yield f"{group}-{plan.storage_data:05d}-{number:03d}.safetensors", items


def _group(name: str) -> str | None:
    """The group of tensors that a file holds, None for the state."""
    match = _TENSOR_FILE.fullmatch(name)
    return match[1] if match else None


def _bytes(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return int(item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize)


def _plain(data: Any) -> Tensor:
    assert isinstance(data, Tensor)
    return data.detach().cpu().contiguous()


def _write_tensors(
    path: Path, tensors: Mapping[str, Tensor], offsets: Mapping[str, list[int]]
) -> dict[str, Any]:
    """Write, flush, read back and compare a file; its size and hash."""
    placed = {name: {"saved_offsets": offset} for name, offset in offsets.items()}
    saved = _unshared(tensors)
    # save_file writes from the tensors' memory; building the file's bytes first would need the
    # size of the optimizer once more.
    save_file(saved, path, metadata={"format": "pt", "DCP_SHARDING_INFO": json.dumps(placed)})
    # It makes files that only their owner may read; the run's other files follow the umask.
    path.chmod(0o666 & ~_umask())
    flush(path)
    back = load_file(path)
    if back.keys() != saved.keys() or not all(_same(back[k], t) for k, t in saved.items()):
        raise CheckpointError(f"{path.name} does not read back as it was written")
    return _fingerprint(path)


def _umask() -> int:
    """What new files may not have. Reading it would set it, for other threads as well."""
    status = Path("/proc/self/status").read_text()
    found = re.search(r"^Umask:\s*([0-7]+)$", status, re.MULTILINE)
    return int(found[1], 8) if found else 0o022


def _write_json(path: Path, value: Any) -> dict[str, Any]:
    content = json.dumps(value, indent=1).encode()
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    if path.read_bytes() != content:
        raise CheckpointError(f"{path.name} does not read back as it was written")
    return _fingerprint(path)


def _unshared(group: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of which no two share memory: safetensors refuses those."""
    result: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in group.items():
        storage = tensor.untyped_storage().data_ptr()
        result[name] = tensor.clone() if storage in seen else tensor
        seen.add(storage)
    return result


def _same(a: Tensor, b: Tensor) -> bool:
    """Equality of type, shape and every bit; NaN equals itself."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        return {"bytes": size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def reason(error: BaseException) -> str:
    """The words of an error, without its number and path."""
    return getattr(error, "strerror", None) or str(error)
