"""Gated linear attention: a decay per channel of the keys, and nothing is erased."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from longhaul.modules.attention.base import Attention, LayerShape, register
from longhaul.modules.attention.parts.gates import LowRank
from longhaul.modules.attention.recurrent.delta import DeltaAttention, RecurrentConfig

_RANK = 16
_TEMPERATURE = 16.0  # which makes memories about so many times as long


@register("gated_linear")
@dataclass(frozen=True, kw_only=True)
class GatedLinearConfig(RecurrentConfig):
    """Keys have half the width of a head, and values all of it, unless told otherwise."""

    short_convolution: int = 0
    """Tokens that a convolution of queries, keys and values reads, with silu; 0: there is none."""

    def widths(self, head_dim: int) -> tuple[int, int]:
        K, V = super().widths(head_dim)
        return max(1, head_dim // 2) if self.key_dim is None else K, V

    def build(self, shape: LayerShape) -> Attention:
        return GatedLinear(self, shape)


class GatedLinear(DeltaAttention):
    """S_t = Diag(e^g_t) S_(t-1) + k_t v_t^T with g_t = log sigmoid(W_2 W_1 x_t + c) / 16.

    q and k are taken as they are. The rank of the decay is 16.
    Source: Yang et al. (2023), arXiv:2312.06635.
    """

    def __init__(self, config: GatedLinearConfig, shape: LayerShape) -> None:
        super().__init__(config, shape)
        self.decay = LowRank(shape.width, _RANK, shape.heads * self.key_dim, bias=True)

    def log_gates(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T H K"]:
        log_g = logsigmoid(self.decay(x)) / _TEMPERATURE
        return log_g.unflatten(-1, (self.num_heads, -1))  # type: ignore[no-any-return]
