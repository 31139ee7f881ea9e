"""Builds the model that an exported config.json describes. It goes out with every export.

`longhaul export` adds lines that import the modules of the model's kinds, which registers them.
"""

from collections.abc import Mapping
from typing import Any

from longhaul.modules.language_model import LanguageModel
from longhaul.modules.language_model_config import LanguageModelConfig


def build_model(shape: Mapping[str, Any]) -> LanguageModel:
    """The model of this shape, the value of `longhaul` in config.json."""
    return LanguageModel(LanguageModelConfig.from_dict(shape))
