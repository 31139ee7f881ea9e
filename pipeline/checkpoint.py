"""Saves, finds and prunes the checkpoints of a run: each is whole or not there.

One process owns a store; others find checkpoints with `newest_checkpoint` and load them. What a
checkpoint looks like inside is in checkpoint_files.py.
"""

import json
import logging
import os
import re
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from longhaul.pipeline.checkpoint_files import (
    STATE,
    CheckpointError,
    reason,
    sync_folder,
    verify,
    write,
)

__all__ = ["CheckpointError", "CheckpointStore", "newest_checkpoint"]

logger = logging.getLogger(__name__)

_COMPLETE = re.compile(r"step-(\d{9,})")
_SAVING = ".saving-"
_REMOVING = ".removing-"
_SPARE_BYTES = 1 << 20  # Room for the small files, folders and what the run logs meanwhile.


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
            write(temporary, tensors, state)
            os.rename(temporary, target)
            sync_folder(self.folder)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise CheckpointError(
                f"checkpoint of step {step} could not be saved in {self.folder}: "
                f"{reason(error)} ({wanted:,} bytes wanted, {_free(self.folder)} free); "
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
        for path in reversed(_complete(self.folder)):
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
                raise CheckpointError(f"{path / name} cannot be read: {reason(error)}") from error
            # load_file maps the file. An optimizer keeps the tensors that it is given, so without
            # a copy the run would hold on to a file that pruning deletes.
            tensors[name.removesuffix(".safetensors")] = {k: t.clone() for k, t in mapped.items()}
        return tensors, json.loads((path / STATE).read_bytes())

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


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint of a store that another process may be writing, None if none.

    Unlike `CheckpointStore.newest` this changes nothing: what looks like the leftover of a save may
    be a save that is going on.
    """
    for path in reversed(_complete(folder)):
        try:
            verify(path)
        except CheckpointError as error:
            logger.warning("%s; it is skipped", error)
        else:
            return path
    return None


def _complete(folder: Path) -> list[Path]:
    """Checkpoint folders by step, oldest first."""
    if not folder.is_dir():
        return []
    found = [(m, p) for p in folder.iterdir() if (m := _COMPLETE.fullmatch(p.name))]
    return [path for _, path in sorted(found, key=lambda pair: int(pair[0][1]))]


def _free(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free:,} bytes"
    except OSError:
        return "unknown"
