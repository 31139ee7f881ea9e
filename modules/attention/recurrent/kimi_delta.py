"""Kimi delta attention: the delta rule with a decay per channel of the keys."""

import math
from dataclasses import dataclass, replace
from typing import Literal

from jaxtyping import Float
from torch import Tensor, nn

from longhaul.modules.attention.base import Attention, LayerShape, register
from longhaul.modules.attention.parts.gates import LowRank
from longhaul.modules.attention.parts.time_step import TimeStep
from longhaul.modules.attention.recurrent.delta import DeltaAttention, DeltaConfig
from longhaul.modules.choices import check_bounds


@register("kimi_delta")
@dataclass(frozen=True, kw_only=True)
class KimiDeltaConfig(DeltaConfig):
    """Keys and values are as wide as a head, unless told otherwise."""

    output_gate: Literal["none", "silu", "sigmoid"] = "sigmoid"
    """none | silu | sigmoid: of a projection of low rank, which multiplies the output."""

    decay_bound: float | None = None
    """b of log decays -b sigmoid(A (W_2 W_1 x + c)), more than 0, usually 5; null: no bound."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self, "decay_bound", above=0, below=math.inf)

    def build(self, shape: LayerShape) -> Attention:
        return KimiDelta(self, shape)


class KimiDelta(DeltaAttention):
    """The delta rule with g_t = -A softplus(W_2 W_1 x_t + c).

    There is one A for each head, and one g_t and c for each channel of its keys. The ranks of the
    decay and of the output gate are the width of a value. With a decay_bound b, g_t = -b
    sigmoid(A (W_2 W_1 x_t + c)).
    Source: Kimi Team (2025), arXiv:2510.26692; the bound is that of GLM-5-Next in transformers.
    """

    def __init__(self, config: KimiDeltaConfig, shape: LayerShape) -> None:
        super().__init__(config, shape)
        self.decay = LowRank(shape.width, self.value_dim, shape.heads * self.key_dim)
        self.time_step = TimeStep(
            shape.heads, rates=(1.0, 16.0), per_head=self.key_dim, bound=config.decay_bound
        )

    def build_output_gate(self) -> nn.Module:
        shape, V = self.shape, self.value_dim
        return nn.Sequential(
            shape.projection(V), replace(shape, width=V).projection(shape.mixed_width)
        )

    def log_gates(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T H K"]:
        _, log_g = self.time_step(self.decay(x))
        return log_g.unflatten(-1, (self.num_heads, -1))  # type: ignore[no-any-return]
