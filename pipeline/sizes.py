"""Sizes of models and states, and numbers as people read them."""

from collections.abc import Sequence

import torch

from longhaul.modules.attention import Attention
from longhaul.modules.language_model import LanguageModel, LanguageModelConfig

HALF = torch.bfloat16  # in which states and caches are compared, as the papers do


def without_memory(config: LanguageModelConfig) -> LanguageModel:
    """The model without its numbers: milliseconds and no memory, whatever its size."""
    with torch.device("meta"):
        return LanguageModel(config)


def attentions(model: LanguageModel) -> list[Attention]:
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


def amount(number: float) -> str:
    """124,000,000 as 124M."""
    value, unit = _scaled(number, ("", "K", "M", "B", "T", "Q"))
    return value + unit


def in_bytes(number: float) -> str:
    """39,000,000 as 39 MB: decimal units, as the papers have them."""
    return " ".join(_scaled(number, ("B", "kB", "MB", "GB", "TB", "PB", "EB")))


def digits(number: float) -> str:
    """Two digits, and all those before the point."""
    if number < 1:
        return f"{number:.2g}"
    return f"{number:.1f}" if number < 9.95 else f"{number:.0f}"


def _scaled(number: float, units: Sequence[str]) -> tuple[str, str]:
    """Digits below 1,000 where a unit allows it, and the unit."""
    power = 0
    while round(number) >= 1000 and power < len(units) - 1:
        number, power = number / 1000, power + 1
    return (digits(number) if power else f"{number:.0f}"), units[power]
