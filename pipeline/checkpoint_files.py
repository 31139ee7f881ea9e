"""What a checkpoint folder holds, how it is written, and how damage is found.

One safetensors file for each group of tensors, `state.json` for everything else, and
`checksums.json`, written last, with the size and sha256 of each. Nothing in it is unpickled.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FORMAT = 1
CHECKSUMS = "checksums.json"
STATE = "state.json"


class CheckpointError(OSError):
    """A checkpoint that could not be written or read, in one line for the user."""


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
        wanted = {f"{name}.safetensors" for name in only}
        if missing := wanted - files.keys():
            raise CheckpointError(f"checkpoint {path} has no {', '.join(sorted(missing))}")
        files = {name: entry for name, entry in files.items() if name in wanted | {STATE}}
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


def write(
    folder: Path, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]
) -> None:
    """Write, flush, read back and compare every file; the checksums come last."""
    files = {STATE: _write_json(folder / STATE, state)}
    for name, group in tensors.items():
        path = folder / f"{name}.safetensors"
        saved = _storable(group)
        # save_file writes from the tensors' memory; building the file's bytes first would need
        # the size of the optimizer once more.
        save_file(saved, path)
        # It makes files that only their owner may read; the run's other files follow the umask.
        shutil.copymode(folder / STATE, path)
        _sync(path)
        back = load_file(path)
        if back.keys() != saved.keys() or not all(_same(back[k], t) for k, t in saved.items()):
            raise CheckpointError(f"{path.name} does not read back as it was written")
        files[path.name] = _fingerprint(path)
    _write_json(folder / CHECKSUMS, {"format": FORMAT, "files": files})
    sync_folder(folder)


def _write_json(path: Path, value: Any) -> dict[str, Any]:
    content = json.dumps(value, indent=1).encode()
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    if path.read_bytes() != content:
        raise CheckpointError(f"{path.name} does not read back as it was written")
    return _fingerprint(path)


def _storable(group: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous CPU tensors, of which no two share memory: safetensors refuses those."""
    result: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in group.items():
        plain = tensor.detach().cpu().contiguous()
        storage = plain.untyped_storage().data_ptr()
        if storage in seen:
            plain = plain.clone()
        seen.add(storage)
        result[name] = plain
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


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# A folder is flushed like a file: its entries are what a rename changes.
sync_folder = _sync


def reason(error: BaseException) -> str:
    """The words of an error, without its number and path."""
    return getattr(error, "strerror", None) or str(error)
