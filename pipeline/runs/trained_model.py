"""Loads a trained model from a run folder or from one of its checkpoints."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from longhaul.configs import RunConfig
from longhaul.datamodules.corpus import Corpus
from longhaul.datamodules.files.untrusted import read_regular
from longhaul.modules.language_model import LanguageModel
from longhaul.modules.meta_device import build_on_meta
from longhaul.modules.rotary import PositionScaling
from longhaul.pipeline.checkpoints.folders import newest_checkpoint, newest_step, step_of
from longhaul.pipeline.checkpoints.integrity import CHECKSUMS, MOST_CHECKSUMS_BYTES, CheckpointError
from longhaul.pipeline.checkpoints.reader import SavedCheckpoint
from longhaul.pipeline.checkpoints.training_state import TrainingState
from longhaul.pipeline.runs.data import training_corpus
from longhaul.pipeline.runs.folder import RunFolder, locate, stored_config
from longhaul.pipeline.runs.ranks import SINGLE_PROCESS, Ranks
from longhaul.pipeline.system.compile_caches import use_private_caches

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class TrainedModel:
    """A model in evaluation mode, and where it came from."""

    model: LanguageModel
    config: RunConfig
    folder: RunFolder
    checkpoint: Path
    step: int
    device: torch.device
    positions: PositionScaling
    corpus: Corpus
    """That it was trained on."""
    checksums: bytes
    """Of the checkpoint's files, which identify the weights."""
    ranks: Ranks = SINGLE_PROCESS
    """The processes that evaluate it together."""


class NamedModel(NamedTuple):
    """The arguments of `load_trained_model`."""

    run_or_checkpoint: str | Path
    positions: str
    factor: float


def load_trained_model(
    run_or_checkpoint: str | Path,
    positions: str = "none",
    factor: float = 1.0,
    ranks: Ranks = SINGLE_PROCESS,
) -> TrainedModel:
    """The model of a checkpoint, or of the newest intact checkpoint of a run.

    Args:
        run_or_checkpoint: path of a run folder or of a checkpoint.
        positions: scaling of positions beyond the training context: none, linear or dynamic_ntk.
        factor: multiple of the training context to which positions are scaled.
        ranks: the processes that evaluate the model together, all of which call this.

    Raises:
        ValueError: the path is neither, the run has no checkpoint yet, or a layer of the model
            does not support this scaling.
        CheckpointError: the checkpoint is damaged.
    """

    def load(folder: RunFolder, checkpoint: Path) -> TrainedModel:
        config = stored_config(folder)
        scaling = PositionScaling(name=positions, factor=factor, context=config.data.context)
        saved = SavedCheckpoint(checkpoint, "model")
        model = _without_weights(config, scaling)
        saved.check_group("model", model.state_dict())
        model.load_state_dict(saved.read_group("model"), assign=True)
        place = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model.to(place).eval()
        step = saved.state(TrainingState).progress.step
        corpus = training_corpus(folder, config)
        checksums = read_regular(checkpoint / CHECKSUMS, MOST_CHECKSUMS_BYTES)
        return TrainedModel(
            model, config, folder, checkpoint, step, place, scaling, corpus, checksums, ranks
        )

    use_private_caches()
    return read_checkpoint(run_or_checkpoint, load, ranks)


def copy_trained_model(
    checkpoint: Path,
    weights: Iterable[tuple[str, Tensor]],
    ranks: Ranks,
    device: torch.device,
) -> TrainedModel:
    """The model of a checkpoint that has just been saved, without reading its tensors.

    Training goes on with its own model, which its ranks may shard, and which is not in evaluation
    mode.

    Args:
        checkpoint: its path.
        weights: of the model in training, by name. All ranks iterate them together.
        ranks: the processes that evaluate the copies together, all of which call this.
        device: of the copy.
    """
    folder, _ = locate(checkpoint)
    config = stored_config(folder)
    scaling = PositionScaling(name="none", factor=1.0, context=config.data.context)
    model = _without_weights(config, scaling)
    wanted = model.state_dict()
    copies = {name: torch.empty_like(tensor, device=device) for name, tensor in wanted.items()}
    # A rank without memory for the copies fails before the others wait for it in `weights`, where
    # each weight of a sharded model needs memory once more, one at a time.
    ranks.gather([True])
    for name, tensor in weights:
        copies[name] = copies[name].to(tensor.dtype).copy_(tensor.detach())
    model.load_state_dict(copies, assign=True)
    model.eval()
    step = step_of(checkpoint)
    corpus = training_corpus(folder, config)
    checksums = read_regular(checkpoint / CHECKSUMS, MOST_CHECKSUMS_BYTES)
    return TrainedModel(
        model, config, folder, checkpoint, step, device, scaling, corpus, checksums, ranks
    )


def _without_weights(config: RunConfig, positions: PositionScaling) -> LanguageModel:
    model = build_on_meta(config.model)
    model.set_positions(positions)
    return model


def read_checkpoint(
    run_or_checkpoint: str | Path,
    read: Callable[[RunFolder, Path], T],
    ranks: Ranks = SINGLE_PROCESS,
) -> T:
    """The result of `read`, called with a path's run folder and its checkpoint, on all ranks alike.

    Training may remove a run's checkpoint while it is read. The newest one is then read instead.

    Raises:
        ValueError: there is no checkpoint.
        CheckpointError: there are only damaged ones.
        Exception: whatever `read` raises for a checkpoint that is still there.
    """
    while True:
        # The first rank chooses: others might find a newer checkpoint.
        chosen = [find_checkpoint(run_or_checkpoint)] if ranks.is_first else []
        ((folder, checkpoint),) = ranks.gather(chosen)
        result, failure = None, None
        try:
            if ranks.is_first:
                for line in folder.changed_sources(stored_config(folder).model.kinds):
                    _warn_once(line)
            result = read(folder, checkpoint)
        except Exception as error:
            failure = error
        is_pruned = failure is not None and _was_pruned(checkpoint)
        if any(ranks.gather([is_pruned])):
            continue
        if failure is not None:
            raise failure
        return cast(T, result)


@cache
def _warn_once(line: str) -> None:
    """Log a warning, which a program that loads many checkpoints of a run would repeat."""
    logger.warning("%s", line)


def _was_pruned(checkpoint: Path) -> bool:
    """Whether a checkpoint that was there is gone; if so, say it."""
    if checkpoint.is_dir():
        return False
    logger.info("%s was removed by its run while it was read; the newest is read", checkpoint)
    return True


def find_checkpoint(run_or_checkpoint: str | Path) -> tuple[RunFolder, Path]:
    """A path's run folder, and its checkpoint: the path itself, or the run's newest intact one.

    Raises:
        ValueError: there is none.
        CheckpointError: there are only damaged ones.
    """
    folder, checkpoint = locate(run_or_checkpoint)
    checkpoint = checkpoint or newest_checkpoint(folder.checkpoints)
    if checkpoint is None and newest_step(folder.checkpoints):
        raise CheckpointError(
            f"{run_or_checkpoint}: found only damaged checkpoints, wanted an intact one"
        )
    if checkpoint is None:
        raise ValueError(f"{run_or_checkpoint}: found no intact checkpoint, wanted one")
    return folder, checkpoint
