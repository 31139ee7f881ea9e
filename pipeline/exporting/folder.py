"""Writes a checkpoint as a folder that transformers loads without longhaul."""

import dataclasses
import math
from pathlib import Path

import torch

from longhaul.datamodules.manifest import load_manifest
from longhaul.datamodules.tokenizer import tokenizer_of
from longhaul.modules.language_model import LanguageModel, LanguageModelConfig
from longhaul.pipeline.checkpoints.integrity import CheckpointError, verify
from longhaul.pipeline.checkpoints.reader import read_state
from longhaul.pipeline.checkpoints.training_state import TrainingState
from longhaul.pipeline.exporting.card import write_card
from longhaul.pipeline.exporting.model_files import write_model_files
from longhaul.pipeline.exporting.tokenizer_files import write_tokenizer
from longhaul.pipeline.exporting.weights import SavedTensor, saved_tensors, write_shards
from longhaul.pipeline.runs.folder import stored_config
from longhaul.pipeline.runs.trained_model import find_checkpoint
from longhaul.pipeline.system.atomic_folder import atomic_folder, new_or_empty_folder

_SHARD_BYTES = 5_000_000_000


def export(
    run_or_checkpoint: str | Path, destination: str | Path, *, shard_bytes: int = _SHARD_BYTES
) -> list[Path]:
    """Write a checkpoint, or a run's newest one, as a Hugging Face folder, complete or not at all.

    Args:
        run_or_checkpoint: the path of either.
        destination: a folder that does not exist yet, or is empty.
        shard_bytes: most bytes per safetensors shard, unless a single tensor is larger.

    Returns:
        The files written.

    Raises:
        ValueError: there is no such checkpoint, or the destination holds something.
        OSError: the checkpoint is damaged, or the folder could not be written.
    """
    target = new_or_empty_folder(destination)
    run, checkpoint = find_checkpoint(run_or_checkpoint)
    config = stored_config(run)
    manifest = load_manifest(config.data.manifest)
    tokenizer = tokenizer_of(manifest)
    tensors = _weights(checkpoint, config.model)
    progress = dataclasses.asdict(read_state(checkpoint, TrainingState).progress)

    with atomic_folder(target) as folder:
        write_shards(folder, tensors, shard_bytes)
        write_model_files(folder, config, manifest)
        write_tokenizer(folder, tokenizer)
        parameters = sum(math.prod(tensor.shape) for tensor in tensors.values())
        write_card(folder, run, config, checkpoint, progress, manifest, parameters)
    return sorted(Path(destination).iterdir())


def _weights(checkpoint: Path, model: LanguageModelConfig) -> dict[str, SavedTensor]:
    """The checkpoint's tensors, in the order of the model, after a check of their shapes."""
    saved = saved_tensors(checkpoint, verify(checkpoint, only=("model",)), "model")
    wanted = _shapes(model)
    for name in sorted(saved.keys() | wanted.keys()):
        shape = saved[name].shape if name in saved else None
        if shape != wanted.get(name):
            raise CheckpointError(
                f"checkpoint {checkpoint}: found shape {shape} for {name}, wanted "
                f"{wanted.get(name)} as in its run's model"
            )
    return {name: saved[name] for name in wanted}


def _shapes(model: LanguageModelConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        state = LanguageModel(model).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in state.items()}
