"""Reads a folder that `longhaul export` wrote: the model's shape, and its weights."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from longhaul.configs.loader import to_dict
from longhaul.modules.language_model import LanguageModelConfig

WEIGHTS = "model.safetensors"
"""The file of all weights. If there are several files, their names are derived from this one."""

WEIGHTS_INDEX = f"{WEIGHTS}.index.json"
"""If there are several files, the index that says which one holds a tensor."""


def shape_of(model: LanguageModelConfig) -> dict[str, Any]:
    """The options that determine what a model's weights mean, named as in the exported config.json.

    `attention` maps each layer's number to all options of its variant that change its results.
    """
    return {
        "vocab_size": model.vocabulary,
        "hidden_size": model.width,
        "num_attention_heads": model.heads,
        "attention": {
            str(layer): {
                key: value
                for key, value in to_dict(config).items()
                if key not in config.speed_options
            }
            for layer, config in enumerate(map(model.attention_of, range(model.layers)))
        },
    }


def is_exported(path: str | Path) -> bool:
    """Whether a folder holds an exported model rather than a run."""
    return (Path(path) / "config.json").is_file()


def exported_shape(folder: Path) -> dict[str, Any]:
    """`shape_of` the model in an exported folder. Raises ValueError for any other folder."""
    path = folder / "config.json"
    try:
        values = json.loads(path.read_bytes())
        if values["model_type"] != "longhaul":
            raise ValueError(f"model_type is {values['model_type']!r}, wanted 'longhaul'")
        attention = {str(layer): one for layer, one in enumerate(values["attention"])}
        sizes = ("vocab_size", "hidden_size", "num_attention_heads")
        return {key: values[key] for key in sizes} | {"attention": attention}
    except (ValueError, TypeError, KeyError) as error:
        cause = f"has no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{path}: not the config of an exported model, {cause}") from error


def exported_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of an exported folder. Raises ValueError if a file is missing or damaged."""
    try:
        index = folder / WEIGHTS_INDEX
        names = {WEIGHTS}
        if index.is_file():
            names = set(json.loads(index.read_bytes())["weight_map"].values())
        weights: dict[str, Tensor] = {}
        for name in sorted(names):
            weights |= load_file(folder / name)
    except (OSError, ValueError, KeyError, AttributeError, SafetensorError) as error:
        raise ValueError(f"{folder}: the weights cannot be read, {error}") from error
    return weights
