"""Softmax attention with rotary positions: the quadratic baseline."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float, Float64
from torch import Tensor

from longhaul.kernels.rotary import rotate
from longhaul.modules.attention.base import Attention, LayerShape, RotaryConfig, register
from longhaul.modules.attention.fused import FusedAttention, KeyValueCache
from longhaul.modules.choices import check_bounds
from longhaul.modules.rotary import Rotary


@register("softmax")
@dataclass(frozen=True, kw_only=True)
class SoftmaxConfig(RotaryConfig):
    """Rotary softmax attention."""

    cost: ClassVar[str] = "quadratic"

    longest_document: int | None = None
    """N of theta_j = 2 pi / N^(2 (j - 1) / K), in tokens, 2 or more; null: rotary_base is used."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self, "longest_document", least=2)

    def build_rotary(self, width: int) -> Rotary | None:
        if self.longest_document is None:
            return super().build_rotary(width)
        return Rotary(width, base=float(self.longest_document), first_turns=1.0)

    def build(self, shape: LayerShape) -> Attention:
        return Softmax(self, shape)


class Softmax(FusedAttention):
    """y_t = sum_i softmax_i(q_t . k_i / sqrt(K)) v_i, with q and k rotated by their positions."""

    rotary: Rotary

    def __init__(self, config: SoftmaxConfig, shape: LayerShape) -> None:
        super().__init__(config, shape)
        self.add_qkv(config.build_rotary)

    def project(
        self, x: Float[Tensor, "B T D"], position: Float64[Tensor, "#B T"]
    ) -> tuple[Float[Tensor, "B H T K"], KeyValueCache]:
        # Keys whose rotation depends on the length of the sequence are cached without it.
        rotation = None if self.rotary.depends_on_length else position
        q, k, v = (one.transpose(1, 2) for one in self.queries_keys_values(x, rotation))
        return q, KeyValueCache(k, v)

    def operands(
        self,
        q: Float[Tensor, "B H T K"],
        k: Float[Tensor, "B H S K"],
        position: Float64[Tensor, "#B S"],
    ) -> tuple[Float[Tensor, "B H T K"], Float[Tensor, "B H S K"]]:
        if not self.rotary.depends_on_length:
            return q, k
        S = k.shape[2]
        cos, sin = (one.transpose(1, 2) for one in self.rotary.phases(position, S, q.dtype))
        past = S - q.shape[2]
        return rotate(q, cos[:, :, past:], sin[:, :, past:]), rotate(k, cos, sin)
