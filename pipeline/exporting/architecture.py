"""Builds the model that an exported config.json describes. It goes out with every export.

`longhaul export` adds lines that import the modules of the model's kinds, which registers them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from longhaul.modules.attention import AttentionConfig, attention_config
from longhaul.modules.language_model import LanguageModel, LanguageModelConfig


def build_model(
    attention: Sequence[Mapping[str, Any]], *, width: int, heads: int, vocabulary: int
) -> LanguageModel:
    """The model whose layers have these kinds, each with the options of its kind."""
    layers = [_layer(**options) for options in attention]
    others = {str(n): one for n, one in enumerate(layers) if one != layers[0]}
    config = LanguageModelConfig(
        attention=layers[0],
        layer_attention=others,
        layers=len(layers),
        width=width,
        heads=heads,
        vocabulary=vocabulary,
    )
    return LanguageModel(config)


def _layer(kind: str, **options: Any) -> AttentionConfig:
    return attention_config(kind)(**options)
