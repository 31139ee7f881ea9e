"""Loads the initial weights of a new run (trainer.start_from)."""

from pathlib import Path
from typing import Any

from torch import Tensor

from longhaul.configs import ConfigError
from longhaul.configs.loader import flatten, to_dict
from longhaul.modules.language_model import LanguageModel
from longhaul.modules.language_model_config import LanguageModelConfig
from longhaul.pipeline.architectures.architecture import canonical
from longhaul.pipeline.checkpoints.reader import SavedCheckpoint
from longhaul.pipeline.runs.exported import exported_model, exported_weights, is_exported
from longhaul.pipeline.runs.folder import stored_config
from longhaul.pipeline.runs.trained_model import find_checkpoint


def load_initial_weights(model: LanguageModel, start_from: str) -> Path:
    """Load the weights of a checkpoint or of an exported folder into a new model.

    The source's model must have the same config, except for initial states, chunk size and
    initialisation. Initial states that the source lacks keep their present values.

    Returns:
        The checkpoint, or the exported folder.

    Raises:
        ConfigError: there is no such source, its model differs, or an exported folder is damaged.
        CheckpointError: the checkpoint is damaged.
    """
    try:
        return _load(model, start_from)
    except ValueError as error:
        raise ConfigError(f"trainer.start_from: {error}") from error


def _load(model: LanguageModel, start_from: str) -> Path:
    if is_exported(start_from):
        source = Path(start_from)
        _compare_options(exported_model(source), model.config, source)
        weights = exported_weights(source)
    else:
        folder, source = find_checkpoint(start_from)
        _compare_options(stored_config(folder).model, model.config, source)
        weights = SavedCheckpoint(source, "model").read_group("model")
    wanted = model.state_dict()
    for name in sorted(weights.keys() | wanted.keys()):
        if name not in weights and "initial_state" in name.split("."):
            continue
        if name not in weights or name not in wanted or weights[name].shape != wanted[name].shape:
            raise ValueError(
                f"found {_shape(weights.get(name))} for {name} in {source}, wanted "
                f"{_shape(wanted.get(name))} as in this run's model"
            )
    model.load_state_dict(weights, strict=False)
    return source


def _compare_options(found: LanguageModelConfig, wanted: LanguageModelConfig, source: Path) -> None:
    said = _weight_options(found), _weight_options(wanted)
    meant = _weight_options(canonical(found)), _weight_options(canonical(wanted))
    # By the key that a config has, where there is one.
    for before, now in (said, meant):
        for key in sorted(before.keys() | now.keys()):
            if before.get(key) != now.get(key) and meant[0].get(key) != meant[1].get(key):
                raise ValueError(
                    f"found {key} {before.get(key)!r} in {source}, wanted {now.get(key)!r} as in "
                    "this run's model"
                )


def _weight_options(model: LanguageModelConfig) -> dict[str, Any]:
    """The options of a model, by flat name, that determine what its weights mean."""
    free = ("initial_state", "rank", "chunk_size", "init")
    options = flatten(to_dict(model), "model.")
    return {key: value for key, value in options.items() if key.rsplit(".", 1)[-1] not in free}


def _shape(tensor: Tensor | None) -> str:
    return "nothing" if tensor is None else f"shape {tuple(tensor.shape)}"
