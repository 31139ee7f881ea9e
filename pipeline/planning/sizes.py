"""Sizes of models and of their states."""

from collections.abc import Sequence

import torch

from longhaul.modules.attention import Attention
from longhaul.modules.language_model import LanguageModel, LanguageModelConfig

HALF = torch.bfloat16  # in which states and caches are compared, as the papers do


def build_on_meta(config: LanguageModelConfig) -> LanguageModel:
    """The model without its numbers: milliseconds and no memory, whatever its size."""
    with torch.device("meta"):
        return LanguageModel(config)


def attention_layers(model: LanguageModel) -> list[Attention]:
    """The attention of every layer, in order."""
    return [module for module in model.modules() if isinstance(module, Attention)]


def state_bytes(layers: Sequence[Attention], T: int) -> int:
    """A sequence's states in half precision, without padding; caches after T tokens."""
    sizes = ((layer, layer.state_size()) for layer in layers)
    return sum(
        layer.allocated_bytes(T, HALF) if size is None else size * HALF.itemsize
        for layer, size in sizes
    )


def allocated_bytes(layers: Sequence[Attention], T: int) -> int:
    """A sequence's states as allocated after T tokens in half precision."""
    return sum(layer.allocated_bytes(T, HALF) for layer in layers)
