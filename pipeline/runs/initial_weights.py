"""Gives a new run the weights that it begins with."""

from pathlib import Path
from typing import Any

from torch import Tensor

from longhaul.configs import ConfigError
from longhaul.configs.loader import flatten, to_dict
from longhaul.modules.language_model import LanguageModel, LanguageModelConfig
from longhaul.pipeline.checkpoints.reader import SavedCheckpoint
from longhaul.pipeline.runs.exported import exported_shape, exported_weights, is_exported, shape_of
from longhaul.pipeline.runs.folder import stored_config
from longhaul.pipeline.runs.trained_model import find_checkpoint


def load_initial_weights(model: LanguageModel, start_from: str) -> Path:
    """Give a new model the weights of a checkpoint or of an exported folder.

    Its model has the same config, but for initial states and the op's chunks. Initial states that
    it lacks stay as they are.

    Returns:
        The checkpoint, or the folder.

    Raises:
        ConfigError: there is none, it is that of another model, or an exported folder is damaged.
        CheckpointError: the checkpoint is damaged.
    """
    try:
        source, before, now = _described(start_from, model.config)
    except ValueError as error:
        raise ConfigError(f"trainer.start_from: {error}") from error
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key):
            raise ConfigError(
                f"trainer.start_from: found {key} {before.get(key)!r} in {source}, "
                f"wanted {now.get(key)!r} as in this run's model"
            )
    try:
        found = (
            exported_weights(source)
            if is_exported(source)
            else SavedCheckpoint(source, "model").read_group("model")
        )
    except ValueError as error:
        raise ConfigError(f"trainer.start_from: {error}") from error
    wanted = model.state_dict()
    for name in sorted(found.keys() | wanted.keys()):
        if name not in found and "initial_state" in name.split("."):
            continue
        if name not in found or name not in wanted or found[name].shape != wanted[name].shape:
            raise ConfigError(
                f"trainer.start_from: found {_shape(found.get(name))} for {name} in {source}, "
                f"wanted {_shape(wanted.get(name))} as in this run's model"
            )
    model.load_state_dict(found, strict=False)
    return source


def _described(
    start_from: str, model: LanguageModelConfig
) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """Where weights lie, and what decides their meaning there and in a model, in the same words."""
    if is_exported(start_from):
        source = Path(start_from)
        return source, _decisive(exported_shape(source)), _decisive(shape_of(model))
    folder, checkpoint = find_checkpoint(start_from)
    before = {"model": to_dict(stored_config(folder).model)}
    return checkpoint, _decisive(before), _decisive({"model": to_dict(model)})


def _decisive(values: dict[str, Any]) -> dict[str, Any]:
    """What of a model's config decides what its weights mean."""
    free = ("initial_state", "rank", "chunk_size")
    return {key: v for key, v in flatten(values).items() if key.rsplit(".", 1)[-1] not in free}


def _shape(tensor: Tensor | None) -> str:
    return "nothing" if tensor is None else f"shape {tuple(tensor.shape)}"
