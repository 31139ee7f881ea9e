"""Finds the checkpoints in the folder of a run, by their names."""

import logging
import math
import re
from pathlib import Path

from longhaul.pipeline.checkpoints.integrity import CHECKSUMS, CheckpointError, verify

logger = logging.getLogger(__name__)

_CHECKPOINT_NAME = re.compile(r"step-(\d{9,})")


def newest_checkpoint(folder: Path, most: float = math.inf) -> Path | None:
    """The newest intact checkpoint in a folder to which another process may be saving, or None.

    Unlike `CheckpointStore.open_newest` this renames and deletes nothing: what looks like the
    leftover of an interrupted save may be a save in progress. `most` is the latest step.
    """
    for path in reversed(checkpoint_folders(folder)):
        if step_of(path) > most:
            continue
        try:
            verify(path)
        except CheckpointError as error:
            if not path.is_dir():  # training has removed it, because there are newer ones by now
                return newest_checkpoint(folder, most)
            logger.warning("%s; it is skipped", error)
        else:
            return path
    return None


def newest_step(folder: Path) -> int:
    """Step of the newest complete checkpoint in a folder, intact or not; 0 without one."""
    complete = (path for path in checkpoint_folders(folder) if (path / CHECKSUMS).exists())
    return max(map(step_of, complete), default=0)


def holds_none(folder: Path) -> bool:
    """Whether a folder holds no checkpoint, nor one that was set aside as damaged."""
    return not checkpoint_folders(folder) and not any(folder.glob("step-*.damaged*"))


def step_of(checkpoint: Path) -> int:
    """The step that a checkpoint is named after."""
    return int(checkpoint.name.removeprefix("step-"))


def checkpoint_folders(folder: Path) -> list[Path]:
    """Checkpoint folders by step, oldest first; what is no folder is none."""
    if not folder.is_dir():
        return []
    found = (path for path in folder.iterdir() if path.is_dir())
    matches = [(m, p) for p in found if (m := _CHECKPOINT_NAME.fullmatch(p.name))]
    return [path for _, path in sorted(matches, key=lambda pair: int(pair[0][1]))]
