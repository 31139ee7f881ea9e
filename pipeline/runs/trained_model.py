"""A trained model from a run folder or from one of its checkpoints."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from longhaul.configs import RunConfig
from longhaul.modules.language_model import LanguageModel
from longhaul.modules.rotary import PositionScaling
from longhaul.pipeline.checkpoints.store import SavedCheckpoint, newest_checkpoint
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
    """The processes that measure it together."""


class NamedModel(NamedTuple):
    """The arguments of `load_trained_model`."""

    run_or_checkpoint: str | Path
    positions: str = "none"
    factor: float = 1.0


def load_trained_model(
    run_or_checkpoint: str | Path, positions: str = "none", factor: float = 1.0
) -> TrainedModel:
    """The model of a checkpoint, or of the newest whole one of a run.

    Args:
        run_or_checkpoint: the path of either.
        positions: none, linear or dynamic_ntk; the run's own context is what it was trained at.
        factor: times by which the context is to grow.

    Raises:
        ValueError: the path is neither, the run has no checkpoint yet, or a layer of the model
            has no such positions.
        CheckpointError: the checkpoint is damaged.
    """
    folder, checkpoint = find_checkpoint(run_or_checkpoint)
    config = stored_config(folder)
    scaling = PositionScaling(name=positions, factor=factor, context=config.data.context)
    saved = SavedCheckpoint(checkpoint, "model")
    with torch.device("meta"):
        model = LanguageModel(config.model)
    model.set_positions(scaling)
    model.load_state_dict(saved.read_group("model"), assign=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device).eval()
    step = int(saved.state["progress"]["step"])
    return TrainedModel(model, config, folder, checkpoint, step, device, scaling)


def find_checkpoint(run_or_checkpoint: str | Path) -> tuple[RunFolder, Path]:
    """The folder of a run, and the checkpoint that a path names or the run's newest whole one.

    Raises ValueError where there is none.
    """
    folder, checkpoint = locate(run_or_checkpoint)
    checkpoint = checkpoint or newest_checkpoint(folder.checkpoints)
    if checkpoint is None:
        raise ValueError(f"{run_or_checkpoint}: found no whole checkpoint, wanted one")
    return folder, checkpoint
