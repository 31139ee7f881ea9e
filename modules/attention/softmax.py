"""Softmax attention with rotary positions: the quadratic baseline."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from jaxtyping import Float, Float64
from torch import Tensor

from longhaul.modules.attention.base import (
    Attention,
    DocumentRotaryConfig,
    LayerShape,
    PartsConfig,
    register,
)
from longhaul.modules.attention.fused import FusedAttention, KeyValueCache
from longhaul.modules.choices import check_bounds
from longhaul.modules.rotary import PositionScaling, Rotary


@register("softmax")
@dataclass(frozen=True, kw_only=True)
class SoftmaxConfig(DocumentRotaryConfig, PartsConfig):
    """Rotary softmax attention."""

    cost: ClassVar[str] = "quadratic"

    rotary: Literal["fixed", "none"] = "fixed"
    """fixed (rotate queries and keys by their positions) | none (no positions: NoPE)."""

    window: int | None = None
    """Tokens that a token sees, itself included, 1 or more; null: all before it."""

    scale: float | None = None
    """Factor of the scores q . k, more than 0; null: K^(-1/2)."""

    softcap: float | None = None
    """c in c tanh(score / c), which bounds scores, more than 0; null: they stay as they are."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self, "window", least=1)
        check_bounds(self, "scale", "softcap", above=0, below=math.inf)
        if self.window is not None and self.rotary_scaling.depends_on_length:
            raise ValueError(
                f"window: found {self.window} with rotary_scaling longrope, whose rates change "
                "with the length; wanted null, or equal short_factor and long_factor"
            )

    def build_rotary(self, width: int) -> Rotary | None:
        return super().build_rotary(width) if self.rotary == "fixed" else None

    def build(self, shape: LayerShape) -> Attention:
        return Softmax(self, shape)


class Softmax(FusedAttention):
    """y_t = sum_i softmax_i(q_t . k_i / sqrt(K)) v_i, with q and k rotated by their positions.

    With another scale and a soft-cap c the logits are c tanh(scale q_t . k_i / c), as in Gemma-2
    (2024), arXiv:2408.00118. With a window, t - window < i.
    """

    def __init__(self, config: SoftmaxConfig, shape: LayerShape) -> None:
        super().__init__(config, shape)
        self.window, self.scale, self.softcap = config.window, config.scale, config.softcap
        self.add_qkv(config.build_rotary)

    def check_positions(self, scaling: PositionScaling) -> None:
        super().check_positions(scaling)
        if self.window is not None and scaling.name == "dynamic_ntk":
            raise ValueError(
                f"positions: found dynamic_ntk for attention with a window of {self.window} "
                "tokens, which no longer sequence widens; wanted linear or none"
            )

    def project(
        self,
        x: Float[Tensor, "B T D"],
        position: Float64[Tensor, "#B T"],
        qkv: Float[Tensor, "B T W"] | None = None,
    ) -> tuple[Float[Tensor, "B H T K"], KeyValueCache]:
        # Keys whose rotation depends on the length of the sequence are cached without it.
        rotation = None if self._rotates_late() else position
        length = self.whole_length(x.shape[1], x.shape[1])
        q, k, v = (
            one.transpose(1, 2) for one in self.queries_keys_values(x, rotation, length, qkv=qkv)
        )
        return q, KeyValueCache(k, v)

    def operands(
        self,
        q: Float[Tensor, "B H T K"],
        k: Float[Tensor, "B G S K"],
        position: Float64[Tensor, "#B S"],
    ) -> tuple[Float[Tensor, "B H T K"], Float[Tensor, "B G S K"]]:
        if self.rotary is None or not self._rotates_late():
            return q, k
        S = k.shape[2]
        cos, sin = (one.transpose(1, 2) for one in self.rotary.phases(position, S, q.dtype))
        past = S - q.shape[2]
        q = self.rotary.rotated(q, cos[:, :, past:], sin[:, :, past:])
        return q, self.rotary.rotated(k, cos, sin)

    def _rotates_late(self) -> bool:
        is_whole = self.sequence_part is not None  # then no later call has a longer sequence
        return self.rotary is not None and self.rotary.depends_on_length and not is_whole
