"""Checkpoint folders that are either whole or not there.

`step-000001200/` holds one safetensors file for each group of tensors, `state.json` for everything
else, and `checksums.json`, written last, with the size and sha256 of each. Nothing in it is
unpickled. One process writes to a store; any process may load from it.
"""

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

logger = logging.getLogger(__name__)

FORMAT = 1
CHECKSUMS = "checksums.json"
STATE = "state.json"
_COMPLETE = re.compile(r"step-(\d{9,})")
_SAVING = ".saving-"
_REMOVING = ".removing-"
_SPARE_BYTES = 1 << 20  # Room for the small files, folders and what the run logs meanwhile.


class CheckpointError(OSError):
    """A checkpoint that could not be written or read, in one line for the user."""


class CheckpointStore:
    """The checkpoints of one run, in one folder."""

    def __init__(self, folder: Path, *, keep_last: int, keep_every: int | None = None) -> None:
        """Name the folder; it is made by the first save.

        Args:
            folder: where `step-NNNNNNNNN` folders live.
            keep_last: how many of the newest checkpoints stay, >= 1.
            keep_every: checkpoints at multiples of this many steps stay for ever. None keeps none.
        """
        if keep_last < 1:
            raise ValueError(f"keep_last: found {keep_last}, wanted 1 or more checkpoints")
        if keep_every is not None and keep_every < 1:
            raise ValueError(f"keep_every: found {keep_every}, wanted 1 or more steps, or None")
        self.folder = folder
        self.keep_last = keep_last
        self.keep_every = keep_every

    def save(
        self,
        step: int,
        tensors: Mapping[str, Mapping[str, Tensor]],
        state: Mapping[str, Any],
    ) -> Path:
        """Write the checkpoint of a step; when this returns it is on disk, read back and named.

        Args:
            step: optimizer updates done, the name of the checkpoint.
            tensors: one file for each entry, such as "model", "optimizer", "rng". Tensors that
                share memory (tied weights) are written once for each name.
            state: anything JSON can hold.

        Raises:
            CheckpointError: nothing was written, and older checkpoints are as they were.
        """
        target = self.folder / f"step-{step:09d}"
        if target.exists():
            # Training is a function of the step, so a whole checkpoint of this step is this one.
            # Replacing it would open a moment in which a crash leaves neither.
            try:
                verify(target)
            except CheckpointError as error:
                self._set_aside(target, error)
            else:
                return target
        wanted = sum(t.numel() * t.element_size() for g in tensors.values() for t in g.values())
        wanted += _SPARE_BYTES
        temporary = self.folder / f"{_SAVING}{target.name}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers()
            free = shutil.disk_usage(self.folder).free
            if free < wanted:
                raise CheckpointError("not enough space, nothing was written")
            temporary.mkdir()
            _write(temporary, tensors, state)
            os.rename(temporary, target)
            _sync_folder(self.folder)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise CheckpointError(
                f"checkpoint of step {step} could not be saved in {self.folder}: "
                f"{_reason(error)} ({wanted:,} bytes wanted, {_free(self.folder)} free); "
                "older checkpoints are untouched"
            ) from error
        self._prune()
        return target

    def newest(self) -> Path | None:
        """The newest whole checkpoint, None when there is none.

        Every file is hashed. A damaged checkpoint is renamed to `step-NNNNNNNNN.damaged`, with a
        warning that says why, and the one before it is tried. What an interrupted save or removal
        left behind is deleted.
        """
        self._remove_leftovers()
        for path in reversed(self._complete()):
            try:
                verify(path)
            except CheckpointError as error:
                self._set_aside(path, error)
            else:
                return path
        return None

    @staticmethod
    def load(
        path: Path, only: Collection[str] | None = None
    ) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        """Tensors (on the CPU) and state of a checkpoint, after hashing the files that are read.

        Args:
            path: a checkpoint folder.
            only: the groups of tensors to read, such as ("model",). None reads all.

        Raises:
            CheckpointError: naming the file that is missing or damaged.
        """
        names = verify(path, only)
        tensors: dict[str, dict[str, Tensor]] = {}
        for name in names:
            if not name.endswith(".safetensors"):
                continue
            try:
                mapped = load_file(path / name)
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path / name} cannot be read: {_reason(error)}") from error
            # load_file maps the file. An optimizer keeps the tensors that it is given, so without
            # a copy the run would hold on to a file that pruning deletes.
            tensors[name.removesuffix(".safetensors")] = {k: t.clone() for k, t in mapped.items()}
        return tensors, json.loads((path / STATE).read_bytes())

    def _complete(self) -> list[Path]:
        """Checkpoint folders by step, oldest first."""
        if not self.folder.is_dir():
            return []
        found = [(m, p) for p in self.folder.iterdir() if (m := _COMPLETE.fullmatch(p.name))]
        return [path for _, path in sorted(found, key=lambda pair: int(pair[0][1]))]

    def _prune(self) -> None:
        for path in self._complete()[: -self.keep_last]:
            if self.keep_every and int(path.name.removeprefix("step-")) % self.keep_every == 0:
                continue
            # Renamed first: a crash in the middle of the removal must not leave something that
            # looks like a damaged checkpoint.
            doomed = self.folder / f"{_REMOVING}{path.name}"
            try:
                os.rename(path, doomed)
                shutil.rmtree(doomed)
            except OSError as error:
                logger.warning("old checkpoint %s could not be removed: %s", path, _reason(error))

    def _remove_leftovers(self) -> None:
        for prefix in (_SAVING, _REMOVING):
            for path in self.folder.glob(f"{prefix}*"):
                shutil.rmtree(path, ignore_errors=True)

    def _set_aside(self, path: Path, error: CheckpointError) -> None:
        aside = path.with_name(f"{path.name}.damaged")
        number = 1
        while aside.exists():
            number += 1
            aside = path.with_name(f"{path.name}.damaged-{number}")
        try:
            os.rename(path, aside)
        except OSError as failure:
            logger.warning("%s; it is skipped (renaming it failed: %s)", error, _reason(failure))
        else:
            logger.warning("%s; it is set aside as %s", error, aside.name)


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
                f"checkpoint {path} is damaged: {name}: {_reason(error)}"
            ) from error
        if found != entry:
            raise CheckpointError(
                f"checkpoint {path} is damaged: {name} has {found}, {CHECKSUMS} says {entry}"
            )
    return list(files)


def _write(
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
    _sync_folder(folder)


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
_sync_folder = _sync


def _reason(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error)


def _free(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free:,} bytes"
    except OSError:
        return "unknown"
