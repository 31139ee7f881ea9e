"""The checkpoint store: saves, finds and prunes the checkpoints of a run.

All ranks save together, each its own shards, in the background while training goes on. A checkpoint
is written under a temporary name and renamed when every file is on disk, so an incomplete one is
never taken for a checkpoint. The files in a checkpoint are described in writer.py.
"""

import json
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import async_save

from longhaul.datamodules.files.atomic import flush
from longhaul.pipeline.checkpoints.folders import checkpoint_folders, holds_none, step_of
from longhaul.pipeline.checkpoints.integrity import (
    CheckpointError,
    first_cause,
    reason,
    verify,
    write_state_and_checksums,
)
from longhaul.pipeline.checkpoints.planner import Planner, SavePlans
from longhaul.pipeline.checkpoints.reader import SavedCheckpoint
from longhaul.pipeline.checkpoints.together import ask_first_rank, place_in
from longhaul.pipeline.checkpoints.writer import CheckpointWriter, write_in_turn

logger = logging.getLogger(__name__)

# torch gives a single process this warning at every save, also from other threads.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")

_SAVING = ".saving-"
_REMOVING = ".removing-"
_SPARE_BYTES = 1 << 20  # room for the small files, the folders, and logs written meanwhile


class CheckpointStore:
    """The checkpoints of one run, in one folder, and the save in progress."""

    def __init__(
        self,
        folder: Path,
        *,
        keep_last: int,
        keep_every: int | None = None,
        longest_update: int = 1,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Prepare the store; nothing is written before the first save.

        Args:
            folder: holds the `step-NNNNNNNNN` folders; the first save creates it.
            keep_last: number of newest checkpoints that are kept, >= 1.
            keep_every: checkpoints at multiples of this many steps are kept for ever. None prunes
                these as well.
            longest_update: most steps of an update, each of which may pass such a multiple.
            group: gloo process group of the ranks that save together. It must be used for nothing
                else, since saves communicate at the same time as training. None for one process.
        """
        self.folder = folder
        self.keep_last = keep_last
        self.keep_every = keep_every
        self.longest_update = longest_update
        self._group = group
        self._is_first = place_in(group)[0] == 0
        self._is_pinned = torch.cuda.is_available()
        # Reused for every save, because page-locked memory is slow to allocate.
        self._stager = _Stager(is_pinned=self._is_pinned)
        self._save_in_progress: tuple[Path, Future[Any]] | None = None
        self._plans = SavePlans()

    def path_of(self, step: int) -> Path:
        """Where the checkpoint of a step is, or would be."""
        return self.folder / f"step-{step:09d}"

    def start(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> Path:
        """Copy the tensors and begin to write them as the checkpoint of a step. All ranks call it.

        Waits first for the previous save, if it is still in progress.

        Args:
            step: optimizer updates done, the name of the checkpoint.
            tensors: named GROUP/NAME with groups such as model, optimizer, rng. Each rank writes
                its shard of a DTensor. A plain tensor is written once, by one of the ranks that
                pass it.
            state: anything JSON can hold. Rank 0's is written.

        Returns:
            The checkpoint's path, which exists once `wait` has returned.

        Raises:
            CheckpointError: the previous save failed.
        """
        self.wait()
        target = self.path_of(step)
        if self._has_intact(target):
            return target
        temporary = self.folder / f"{_SAVING}{target.name}"
        planner = Planner(self._plans, self._group)
        save = partial(
            async_save,
            dict(tensors),
            storage_writer=CheckpointWriter(
                temporary,
                begin=lambda: self._begin(temporary, planner.num_bytes),
                # Copied, because the caller goes on changing the state.
                end=partial(self._commit, temporary, target, json.loads(json.dumps(state))),
            ),
            planner=planner,
            process_group=self._group,
            no_dist=self._group is None,
        )
        try:
            future = save(async_stager=self._stager)
        except RuntimeError as error:  # Nothing is written, or agreed with other ranks, before it.
            if not self._is_pinned:
                raise
            logger.warning(
                "checkpoints are copied more slowly, without page-locked memory: %s", error
            )
            self._is_pinned = False
            self._stager = _Stager(is_pinned=False)
            future = save(async_stager=self._stager)
        assert isinstance(future, Future)
        self._save_in_progress = target, future
        return target

    def write(
        self,
        step: int,
        num_bytes: int,
        tensors: Iterable[tuple[str, Tensor]],
        state: Mapping[str, Any],
    ) -> Path:
        """Write a checkpoint of so many bytes from tensors that come one after the other.

        It is one process's, and of one group; the rest is as in `start`. It is on disk, and has
        its name, when this returns.

        Raises:
            CheckpointError: there is not enough space.
        """
        target = self.path_of(step)
        temporary = self.folder / f"{_SAVING}{target.name}"
        self._begin(temporary, num_bytes)
        self._commit(temporary, target, state, write_in_turn(temporary, tensors))
        return target

    def wait(self) -> None:
        """Wait until the save in progress, if any, is on disk, compared, and has its final name.

        Raises:
            CheckpointError: on all ranks, if the save failed on any. Its files are removed, and
                older checkpoints are unchanged.
        """
        if self._save_in_progress is None:
            return
        target, future = self._save_in_progress
        self._save_in_progress = None
        try:
            future.result()
        except (Exception, CheckpointException) as error:
            if self._is_first:
                _remove(self.folder / f"{_SAVING}{target.name}")
            raise CheckpointError(
                f"checkpoint of step {step_of(target)} could not be saved in {self.folder}: "
                f"{first_cause(error)}; older checkpoints are untouched"
            ) from error

    @property
    def is_saving(self) -> bool:
        """Whether a save is in progress in the background. If it failed, `wait` raises."""
        return self._save_in_progress is not None and not self._save_in_progress[1].done()

    @property
    def has_failed(self) -> bool:
        """Whether the last save has failed and `wait` has not been called since: it would raise."""
        return (
            self._save_in_progress is not None
            and self._save_in_progress[1].done()
            and self._save_in_progress[1].exception() is not None
        )

    def open_newest(self) -> SavedCheckpoint | None:
        """The newest intact checkpoint, None if the folder holds none. All ranks call it.

        Every file is hashed, each by one of the ranks. A damaged checkpoint is renamed to
        `step-NNNNNNNNN.damaged`, with a warning that says why, and the checkpoint before it is
        tried. What interrupted saves and removals left behind is deleted.

        Raises:
            CheckpointError: there are only damaged checkpoints.
        """
        for path in reversed(ask_first_rank(self._group, self._clean_folder)):
            try:
                contents = verify(path, rank_group=self._group)
            except CheckpointError as error:
                self._set_aside(path, error)
            else:
                return SavedCheckpoint(path, rank_group=self._group, verified=contents)
        if not ask_first_rank(self._group, partial(holds_none, self.folder)):
            raise CheckpointError(
                f"{self.folder}: found only damaged checkpoints, wanted an intact one; to start "
                "over, give the run another name or remove its folder"
            )
        return None

    def open_found(self, find: Callable[[], Path]) -> SavedCheckpoint:
        """The checkpoint that `find` finds on the first rank, also of another run.

        All ranks call it, and get what `find` raises.

        Raises:
            CheckpointError: it is damaged.
        """
        return SavedCheckpoint(ask_first_rank(self._group, find), rank_group=self._group)

    def _clean_folder(self) -> list[Path]:
        """Remove the leftovers, and return the checkpoints."""
        self._remove_leftovers()
        return checkpoint_folders(self.folder)

    def _has_intact(self, target: Path) -> bool:
        """Whether an intact checkpoint of this name exists; a damaged one is set aside.

        A resumed run repeats its steps exactly, so an existing intact checkpoint of a step equals
        the one that would be written. It is not replaced, because a crash between removing the old
        one and renaming the new one would leave neither.
        """
        if not ask_first_rank(self._group, partial(os.path.lexists, target)):
            return False
        try:
            verify(target, rank_group=self._group)
        except (CheckpointError, ValueError) as error:
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
        write_state_and_checksums(temporary, state, files)
        if os.path.lexists(target):  # put there during the save
            self._set_aside(target, CheckpointError(f"{target} was not there before its save"))
        os.rename(temporary, target)
        flush(self.folder)
        self._prune(target)

    def _prune(self, newest: Path) -> None:
        # What has a later step is not this run's, and counts for nothing: it may hold no weights.
        known = [p for p in checkpoint_folders(self.folder) if step_of(p) <= step_of(newest)]
        for path in known[: -self.keep_last]:
            if self.keep_every and step_of(path) % self.keep_every < self.longest_update:
                continue
            # Renamed first, so that a crash during the removal does not leave a folder that looks
            # like a damaged checkpoint.
            doomed = self.folder / f"{_REMOVING}{path.name}"
            try:
                os.rename(path, doomed)
                shutil.rmtree(doomed)
            except OSError as error:
                logger.warning("old checkpoint %s could not be removed: %s", path, reason(error))

    def _remove_leftovers(self) -> None:
        for prefix in (_SAVING, _REMOVING):
            for path in self.folder.glob(f"{prefix}*"):
                _remove(path)

    def _set_aside(self, path: Path, error: Exception) -> None:
        """Rename a damaged checkpoint, of which all ranks know."""
        if not self._is_first:
            return
        aside = path.with_name(f"{path.name}.damaged")
        number = 1
        while os.path.lexists(aside):
            number += 1
            aside = path.with_name(f"{path.name}.damaged-{number}")
        try:
            os.rename(path, aside)
        except OSError as failure:
            logger.warning("%s; it is skipped (renaming it failed: %s)", error, reason(failure))
        else:
            logger.warning("%s; it is set aside as %s", error, aside.name)


def _remove(path: Path) -> None:
    """Remove a folder, or whatever else has its name: rmtree would wait for a FIFO's writer."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


class _Stager(AsyncStager):
    """Copies tensors to memory of the CPU, page-locked or not, as often as it is asked.

    DefaultStager of torch 2.11 can do so once.
    """

    _synchronize_after_execute = False  # `stage` has waited

    def __init__(self, *, is_pinned: bool) -> None:
        self._is_pinned = is_pinned
        self._stager = StateDictStager(pin_memory=is_pinned, share_memory=False)

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        copies: dict[str, Any] = self._stager.stage(state_dict, non_blocking=self._is_pinned)
        if self._is_pinned:
            torch.accelerator.synchronize()
        return copies

    def synchronize_staging(self) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        self._stager.close()
