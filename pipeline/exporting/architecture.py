"""Builds the model that an exported config.json describes. It goes out with every export.

`longhaul export` adds lines that import the modules of the model's kinds, which registers them.
"""

from typing import Any

from longhaul.modules.language_model import LanguageModel, config_of_layers


def build_model(**shape: Any) -> LanguageModel:
    """The model of this shape: the arguments of `config_of_layers`, named as in config.json."""
    return LanguageModel(config_of_layers(**shape))
