"""Softmax attention in a sliding window: the quadratic baseline made linear."""

from dataclasses import dataclass
from typing import ClassVar

from longhaul.modules.attention.base import register
from longhaul.modules.attention.softmax import SoftmaxConfig


@register("sliding_window")
@dataclass(frozen=True, kw_only=True)
class SlidingWindowConfig(SoftmaxConfig):
    """The options of softmax, in a window.

    Source: Beltagy, Peters, Cohan (2020), arXiv:2004.05150; Jiang et al. (2023), arXiv:2310.06825.
    """

    cost: ClassVar[str] = "linear"
    positions: ClassVar[tuple[str, ...]] = ("none", "linear")

    window: int = 512
    """Tokens that a token sees, itself included, 1 or more."""
