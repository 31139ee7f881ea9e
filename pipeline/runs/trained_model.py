"""Loads a trained model from a run folder or from one of its checkpoints."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from longhaul.configs import RunConfig
from longhaul.modules.language_model import LanguageModel
from longhaul.modules.rotary import PositionScaling
from longhaul.pipeline.checkpoints.reader import SavedCheckpoint
from longhaul.pipeline.checkpoints.store import newest_checkpoint
from longhaul.pipeline.checkpoints.training_state import TrainingState
from longhaul.pipeline.runs.folder import RunFolder, locate, stored_config
from longhaul.pipeline.runs.ranks import ALONE, Ranks


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
    ranks: Ranks = ALONE
    """The processes that evaluate it together."""


class NamedModel(NamedTuple):
    """The arguments of `load_trained_model`."""

    run_or_checkpoint: str | Path
    positions: str
    factor: float


def load_trained_model(
    run_or_checkpoint: str | Path, positions: str = "none", factor: float = 1.0
) -> TrainedModel:
    """The model of a checkpoint, or of the newest intact checkpoint of a run.

    Args:
        run_or_checkpoint: path of a run folder or of a checkpoint.
        positions: scaling of positions beyond the training context: none, linear or dynamic_ntk.
        factor: multiple of the training context to which positions are scaled.

    Raises:
        ValueError: the path is neither, the run has no checkpoint yet, or a layer of the model
            does not support this scaling.
        CheckpointError: the checkpoint is damaged.
    """
    folder, checkpoint = find_checkpoint(run_or_checkpoint)
    config = stored_config(folder)
    scaling = PositionScaling(name=positions, factor=factor, context=config.data.context)
    saved = SavedCheckpoint(checkpoint, "model")
    with torch.device("meta"):
        model = LanguageModel(config.model)
    model.set_positions(scaling)
    saved.check_group("model", model.state_dict())
    model.load_state_dict(saved.read_group("model"), assign=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device).eval()
    step = saved.state(TrainingState).progress.step
    return TrainedModel(model, config, folder, checkpoint, step, device, scaling)


def find_checkpoint(run_or_checkpoint: str | Path) -> tuple[RunFolder, Path]:
    """A path's run folder, and its checkpoint: the path itself, or the run's newest intact one.

    Raises:
        ValueError: there is none.
    """
    folder, checkpoint = locate(run_or_checkpoint)
    checkpoint = checkpoint or newest_checkpoint(folder.checkpoints)
    if checkpoint is None:
        raise ValueError(f"{run_or_checkpoint}: found no intact checkpoint, wanted one")
    return folder, checkpoint
