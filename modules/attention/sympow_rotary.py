"""Symmetric-power attention with learned rotation rates: sympow + learned rotary."""

from dataclasses import dataclass

from longhaul.modules.attention.base import Attention, register
from longhaul.modules.attention.sympow import RotationRate, Sympow, SympowOptions


@register("sympow_rotary")
@dataclass(frozen=True, kw_only=True)
class SympowRotaryConfig(SympowOptions):
    """The options of sympow but rotary."""

    def build(self, model_dim: int, num_heads: int, layer: int = 0) -> Attention:
        return SympowRotary(self, model_dim, num_heads)


class SympowRotary(Sympow):
    """Sympow rotated by mu_t = mu_(t-1) + beta_t theta, with beta_t = 1 + tanh(W x_t).

    Source: Conformal Transformations for Symmetric Power Transformers (2025), section 3.2.
    """

    def __init__(self, config: SympowRotaryConfig, model_dim: int, num_heads: int) -> None:
        super().__init__(config, model_dim, num_heads)
        self.rate = RotationRate(model_dim)
