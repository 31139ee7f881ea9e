"""A trained model from a run folder or from one of its checkpoints."""

from dataclasses import dataclass
from pathlib import Path

import torch

from longhaul.configs import RunConfig
from longhaul.modules.language_model import LanguageModel
from longhaul.pipeline.checkpoint import CheckpointStore, newest_checkpoint
from longhaul.pipeline.run_folder import RunFolder, locate, stored_config


@dataclass(frozen=True)
class TrainedModel:
    """A model in evaluation mode, and where it came from."""

    model: LanguageModel
    config: RunConfig
    folder: RunFolder
    checkpoint: Path
    step: int
    device: torch.device


def load_trained_model(run_or_checkpoint: str | Path) -> TrainedModel:
    """The model of a checkpoint, or of the newest whole one of a run.

    Raises:
        ValueError: the path is neither, or the run has no checkpoint yet.
        CheckpointError: the checkpoint is damaged.
    """
    folder, checkpoint = locate(run_or_checkpoint)
    config = stored_config(folder)
    if checkpoint is None:
        checkpoint = newest_checkpoint(folder.checkpoints)
    if checkpoint is None:
        raise ValueError(f"{run_or_checkpoint}: found no whole checkpoint, wanted one")
    tensors, state = CheckpointStore.load(checkpoint, only=["model"])
    with torch.device("meta"):
        model = LanguageModel(config.model)
    model.load_state_dict(tensors["model"], assign=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device).eval()
    return TrainedModel(model, config, folder, checkpoint, int(state["progress"]["step"]), device)
