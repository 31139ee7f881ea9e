"""Sizes of models and of the states of their attention layers."""

from collections.abc import Sequence

import torch

from longhaul.modules.attention import Attention
from longhaul.modules.language_model import LanguageModel

HALF = torch.bfloat16  # states and caches are compared in it, as in the papers


def attention_layers(model: LanguageModel) -> list[Attention]:
    """The attention modules of all layers, in order."""
    return [module for module in model.modules() if isinstance(module, Attention)]


def state_bytes(layers: Sequence[Attention], T: int) -> int:
    """Bytes of a sequence's states in half precision without padding; of caches after T tokens."""
    sizes = ((layer, layer.state_size()) for layer in layers)
    return sum(
        layer.allocated_bytes(T, HALF) if size is None else size * HALF.itemsize
        for layer, size in sizes
    )


def allocated_bytes(layers: Sequence[Attention], T: int) -> int:
    """Bytes allocated for one sequence's states after T tokens, in half precision."""
    return sum(layer.allocated_bytes(T, HALF) for layer in layers)
