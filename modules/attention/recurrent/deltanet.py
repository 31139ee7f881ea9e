"""DeltaNet: the delta rule without decay."""

from dataclasses import dataclass
from typing import Literal

from longhaul.modules.attention.base import Attention, LayerShape, register
from longhaul.modules.attention.recurrent.delta import DeltaAttention, DeltaConfig


@register("deltanet")
@dataclass(frozen=True, kw_only=True)
class DeltaNetConfig(DeltaConfig):
    """Keys and values are as wide as a head, and there is no output gate, unless told otherwise."""

    output_gate: Literal["none", "silu", "sigmoid"] = "none"
    """none | silu | sigmoid: of one more projection of x, which multiplies the output."""

    def build(self, shape: LayerShape) -> Attention:
        return DeltaNet(self, shape)


class DeltaNet(DeltaAttention):
    """The delta rule with g_t = 0. Source: Yang et al. (2024), arXiv:2406.06484."""
