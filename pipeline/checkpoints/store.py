"""Saves, finds and prunes the checkpoints of a run: each is whole or not there.

All ranks save together, each its part, while they go on training; the checkpoint gets its name when
every part is on disk. Others find checkpoints with `newest_checkpoint` and load them. What a
checkpoint looks like inside is in checkpoint_files.py.
"""

import json
import logging
import os
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from longhaul.pipeline.checkpoints.files import (
    STATE,
    CheckpointError,
    CheckpointWriter,
    reason,
    verify,
    write_listing,
)
from longhaul.pipeline.system.files import flush

__all__ = ["CheckpointError", "CheckpointStore", "Saved", "newest_checkpoint"]

logger = logging.getLogger(__name__)

_Found = TypeVar("_Found")

# A single process is told that it is one at every save and load, also from other threads.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")

_COMPLETE = re.compile(r"step-(\d{9,})")
_SAVING = ".saving-"
_REMOVING = ".removing-"
_SPARE_BYTES = 1 << 20  # Room for the small files, folders and what the run logs meanwhile.


class CheckpointStore:
    """The checkpoints of one run, in one folder, and the save that is under way."""

    def __init__(
        self,
        folder: Path,
        *,
        keep_last: int,
        keep_every: int | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Name the folder; it is made by the first save.

        Args:
            folder: where `step-NNNNNNNNN` folders live.
            keep_last: how many of the newest checkpoints stay, >= 1.
            keep_every: checkpoints at multiples of this many steps stay for ever. None keeps none.
            group: of the ranks that save together, over gloo and used for nothing else, since
                saves talk while training does. None is one process.
        """
        if keep_last < 1:
            raise ValueError(f"keep_last: found {keep_last}, wanted 1 or more checkpoints")
        if keep_every is not None and keep_every < 1:
            raise ValueError(f"keep_every: found {keep_every}, wanted 1 or more steps, or None")
        self.folder = folder
        self.keep_last = keep_last
        self.keep_every = keep_every
        self._group = group
        self._is_first = group is None or dist.get_rank(group) == 0
        gpu = torch.cuda.is_available()
        # Kept from save to save: page-locked memory is slow to get.
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=gpu,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=gpu,
            )
        )
        self._running: tuple[Path, Future[Any]] | None = None

    def path_of(self, step: int) -> Path:
        """Where the checkpoint of a step is, or would be."""
        return self.folder / f"step-{step:09d}"

    def start(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> Path:
        """Copy the tensors and begin to write them as the checkpoint of a step; all ranks call it.

        Waits for the save before it, if that still goes on.

        Args:
            step: optimizer updates done, the name of the checkpoint.
            tensors: named GROUP/NAME with groups such as model, optimizer, rng. Those that are
                sharded as DTensors are written by the ranks that hold them, others by any rank
                that has them.
            state: anything JSON can hold; rank 0's is written.

        Returns:
            Where the checkpoint will be, when `wait` has returned.

        Raises:
            CheckpointError: the save before it failed.
        """
        self.wait()
        target = self.path_of(step)
        if _ask_first(self._group, partial(self._has_whole, target)):
            return target
        temporary = self.folder / f"{_SAVING}{target.name}"
        future = async_save(
            dict(tensors),
            storage_writer=CheckpointWriter(
                temporary,
                begin=partial(self._begin, temporary),
                # Copied: what is given goes on changing.
                end=partial(self._commit, temporary, target, json.loads(json.dumps(state))),
            ),
            process_group=self._group,
            no_dist=self._group is None,
            async_stager=self._stager,
        )
        assert isinstance(future, Future)
        self._running = target, future
        return target

    def wait(self) -> None:
        """Wait until the save under way, if any, is on disk, read back and named.

        Raises:
            CheckpointError: on all ranks, if it failed on any. Nothing of it stays, and older
                checkpoints are as they were.
        """
        if self._running is None:
            return
        target, future = self._running
        self._running = None
        try:
            future.result()
        except (Exception, CheckpointException) as error:
            if self._is_first:
                shutil.rmtree(self.folder / f"{_SAVING}{target.name}", ignore_errors=True)
            raise CheckpointError(
                f"checkpoint of step {int(target.name.removeprefix('step-'))} could not be saved "
                f"in {self.folder}: {_first_cause(error)}; older checkpoints are untouched"
            ) from error

    @property
    def is_saving(self) -> bool:
        """Whether a save goes on in the background; one that failed is not over before `wait`."""
        return self._running is not None and not self._running[1].done()

    @property
    def has_failed(self) -> bool:
        """Whether `wait` would raise at once."""
        return (
            self._running is not None
            and self._running[1].done()
            and self._running[1].exception() is not None
        )

    def open_newest(self) -> "Saved | None":
        """The newest whole checkpoint, None when there is none; all ranks call it.

        Every file is hashed. A damaged checkpoint is renamed to `step-NNNNNNNNN.damaged`, with a
        warning that says why, and the one before it is tried. What an interrupted save or removal
        left behind is deleted.

        Raises:
            CheckpointError: there are damaged checkpoints alone.
        """
        found = _ask_first(self._group, self._find_newest)
        if found is None:
            return None
        path, names = found
        return Saved(path, rank_group=self._group, hashed=names)

    def _find_newest(self) -> tuple[Path, list[str]] | None:
        self._remove_leftovers()
        for path in reversed(_complete(self.folder)):
            try:
                return path, verify(path)
            except CheckpointError as error:
                self._set_aside(path, error)
        if any(self.folder.glob("*.damaged*")):
            raise CheckpointError(
                f"{self.folder}: found damaged checkpoints alone, wanted a whole one; to start "
                "over, give the run another name or remove its folder"
            )
        return None

    def _has_whole(self, target: Path) -> bool:
        """Whether the checkpoint is there; a damaged one is set aside.

        Training goes on from a checkpoint as it did before, so that a whole one of a step is as
        good as the one that would be written, and replacing it would open a moment in which a crash
        leaves neither.
        """
        if not target.exists():
            return False
        try:
            verify(target)
        except CheckpointError as error:
            self._set_aside(target, error)
            return False
        return True

    def _begin(self, temporary: Path, num_bytes: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._remove_leftovers()
        wanted, free = num_bytes + _SPARE_BYTES, shutil.disk_usage(self.folder).free
        if free < wanted:
            raise CheckpointError(f"not enough space, {free:,} bytes free, {wanted:,} bytes wanted")
        temporary.mkdir()

    def _commit(
        self, temporary: Path, target: Path, state: Mapping[str, Any], files: Mapping[str, Any]
    ) -> None:
        write_listing(temporary, state, files)
        os.rename(temporary, target)
        flush(self.folder)
        self._prune()

    def _prune(self) -> None:
        for path in _complete(self.folder)[: -self.keep_last]:
            if self.keep_every and int(path.name.removeprefix("step-")) % self.keep_every == 0:
                continue
            # Renamed first: a crash in the middle of the removal must not leave something that
            # looks like a damaged checkpoint.
            doomed = self.folder / f"{_REMOVING}{path.name}"
            try:
                os.rename(path, doomed)
                shutil.rmtree(doomed)
            except OSError as error:
                logger.warning("old checkpoint %s could not be removed: %s", path, reason(error))

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
            logger.warning("%s; it is skipped (renaming it failed: %s)", error, reason(failure))
        else:
            logger.warning("%s; it is set aside as %s", error, aside.name)


class Saved:
    """A checkpoint that was hashed, to be read as the tensors that are wanted."""

    def __init__(
        self,
        path: Path,
        *groups: str,
        rank_group: dist.ProcessGroup | None = None,
        hashed: list[str] | None = None,
    ) -> None:
        """Hash the groups of tensors that will be read; none given are all.

        Args:
            path: a checkpoint folder.
            groups: such as model.
            rank_group: of the ranks that read together; None is one process. The first one hashes.
            hashed: the names of the checkpoint's files, if all have been hashed just now.

        Raises:
            CheckpointError: naming the file that is missing or damaged.
        """
        self.path = path
        self._rank_group = rank_group
        names = hashed or _ask_first(rank_group, partial(verify, path, groups or None))
        self.state: dict[str, Any] = json.loads((path / STATE).read_bytes())
        self._reader = HuggingFaceStorageReader(str(path))
        # It would read all files of the folder, also those that were not hashed.
        self._reader.fs = _Files(names)
        found = self._reader.read_metadata().state_dict_metadata
        self.tensors: dict[str, TensorStorageMetadata] = {
            name: entry for name, entry in found.items() if isinstance(entry, TensorStorageMetadata)
        }

    def read(self, into: Mapping[str, Tensor]) -> None:
        """Fill these tensors, each the whole one or, as a DTensor, this rank's part of it."""
        for name, tensor in into.items():
            if name not in self.tensors or self.tensors[name].size != tensor.shape:
                found = self.tensors[name].size if name in self.tensors else None
                raise CheckpointError(
                    f"checkpoint {self.path}: found {_shape(found)} for {name}, wanted "
                    f"{_shape(tensor.shape)}"
                )
        if not into:
            return
        try:
            load(
                dict(into),
                storage_reader=self._reader,
                process_group=self._rank_group,
                no_dist=self._rank_group is None,
            )
        except (Exception, CheckpointException) as error:
            raise CheckpointError(
                f"checkpoint {self.path} cannot be read: {_first_cause(error)}"
            ) from error

    def read_one(self, name: str) -> Tensor:
        """One whole tensor, on the CPU."""
        tensor = self.empty(name)
        self.read({name: tensor})
        return tensor

    def empty(self, name: str) -> Tensor:
        """Memory for a whole tensor, on the CPU."""
        entry = self.tensors[name]
        return torch.empty(entry.size, dtype=entry.properties.dtype)

    def read_group(self, group: str) -> dict[str, Tensor]:
        """All tensors of a group, on the CPU, by their names in it."""
        whole = {name: self.empty(name) for name in self.tensors if name.startswith(f"{group}/")}
        self.read(whole)
        return {name.removeprefix(f"{group}/"): tensor for name, tensor in whole.items()}


class _Files(FileSystem):
    """A folder that has nothing but these files."""

    def __init__(self, names: list[str]) -> None:
        self._names = names

    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        return [os.path.join(path, name) for name in self._names]


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint of a store that another process may be writing, None if none.

    Unlike `CheckpointStore.open_newest` this changes nothing: what looks like the leftover of a
    save may be a save that is going on.
    """
    for path in reversed(_complete(folder)):
        try:
            verify(path)
        except CheckpointError as error:
            logger.warning("%s; it is skipped", error)
        else:
            return path
    return None


def _ask_first(group: dist.ProcessGroup | None, look: Callable[[], _Found]) -> _Found:
    """What `look` returns, or raises, on the first rank of a group, on all its ranks."""
    answer: list[Any] = [None]
    if group is None or dist.get_rank(group) == 0:
        try:
            answer = [look()]
        except (OSError, ValueError) as error:
            answer = [error]
    if group is not None:
        dist.broadcast_object_list(answer, group=group, group_src=0)
    if isinstance(answer[0], Exception):
        raise answer[0]
    return cast(_Found, answer[0])


def _complete(folder: Path) -> list[Path]:
    """Checkpoint folders by step, oldest first."""
    if not folder.is_dir():
        return []
    found = [(m, p) for p in folder.iterdir() if (m := _COMPLETE.fullmatch(p.name))]
    return [path for _, path in sorted(found, key=lambda pair: int(pair[0][1]))]


def _first_cause(error: BaseException) -> str:
    """What went wrong first, of the errors that torch gathers from the ranks."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, (cause, _) = min(failures.items())
        where = f"rank {rank}: " if len(failures) > 1 or rank else ""
        return where + reason(cause)
    return reason(error)


def _shape(size: torch.Size | None) -> str:
    return "nothing" if size is None else f"shape {tuple(size)}"
