"""Builds the model that an exported config.json describes. It goes out with every export.

`longhaul export` adds lines that import the modules of the model's kinds, which registers them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from longhaul.modules.language_model import LanguageModel, model_config


def build_model(
    attention: Sequence[Mapping[str, Any]], *, width: int, heads: int, vocabulary: int
) -> LanguageModel:
    """The model whose layers have these kinds, each with the options of its kind."""
    return LanguageModel(model_config(attention, width=width, heads=heads, vocabulary=vocabulary))
