"""DeltaNet: the delta rule without decay."""

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from longhaul.modules.attention.base import Attention, LayerShape, register
from longhaul.modules.attention.parts.gates import ScalarPerHead
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
    """The delta rule with b_t = sigmoid(W x_t), or twice that, and g_t = 0.

    Source: Yang et al. (2024), arXiv:2406.06484.
    """

    def __init__(self, config: DeltaNetConfig, shape: LayerShape) -> None:
        super().__init__(config, shape)
        self.strongest = 2.0 if config.negative_eigenvalues else 1.0
        self.write = ScalarPerHead(shape.width, shape.heads)

    def write_and_decay(self, x: Float[Tensor, "B T D"]) -> tuple[Float[Tensor, "B T H"], None]:
        return self.strongest * self.write(x).sigmoid(), None
