"""Symmetric-power attention with learned rotation rates: sympow + learned rotary."""

from dataclasses import dataclass

from longhaul.modules.attention.base import Attention, LayerShape, register
from longhaul.modules.attention.sympow import RotationRate, Sympow, SympowOptions


@register("sympow_rotary")
@dataclass(frozen=True, kw_only=True)
class SympowRotaryConfig(SympowOptions):
    """The options of sympow but rotary."""

    def build(self, shape: LayerShape) -> Attention:
        return SympowRotary(self, shape)


class SympowRotary(Sympow):
    """Sympow rotated by mu_t = mu_(t-1) + beta_t theta, with beta_t = 1 + tanh(W x_t).

    Source: Conformal Transformations for Symmetric Power Transformers (2025), section 3.2.
    """

    def __init__(self, config: SympowRotaryConfig, shape: LayerShape) -> None:
        super().__init__(config, shape)
        self.rate = RotationRate(shape.width)
