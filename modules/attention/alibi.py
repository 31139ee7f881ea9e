"""ALiBi: softmax attention whose only positions are a bias that falls with distance."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from longhaul.modules.attention.base import Attention, LayerShape, PartsConfig, register
from longhaul.modules.attention.fused import Cache, FusedAttention
from longhaul.modules.attention.parts.gates import alibi_slopes
from longhaul.modules.attention.parts.masked_softmax import masked_softmax
from longhaul.modules.documents import Documents


@register("alibi")
@dataclass(frozen=True, kw_only=True)
class AlibiConfig(PartsConfig):
    """Its slopes are fixed."""

    cost: ClassVar[str] = "quadratic"

    def build(self, shape: LayerShape) -> Attention:
        return Alibi(self, shape)


class Alibi(FusedAttention):
    """y_t = sum_i softmax_i(q_t . k_i / sqrt(K) - m_h (t - i)) v_i, m_h = 2^(-8 h / H), h = 1, ...

    The bias is a fixed decay: the weights are those of a forget gate exp(-m_h) on exp(q . k).
    Source: Press, Smith, Lewis (2021), arXiv:2108.12409, with its slopes for any number of heads.
    """

    def __init__(self, config: AlibiConfig, shape: LayerShape) -> None:
        super().__init__(config, shape)
        self.add_qkv()

    def logits(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B H T T"]:
        logits = super().logits(x)
        position = torch.arange(x.shape[1], dtype=logits.dtype, device=x.device)
        slopes = alibi_slopes(self.num_heads, x.device).to(logits.dtype)
        return logits - slopes[:, None, None] * (position[:, None] - position)

    def mix(
        self,
        q: Float[Tensor, "B H T K"],
        cache: Cache,
        position: Float64[Tensor, "#B S"],
        documents: Documents | None = None,
    ) -> Float[Tensor, "B H T V"]:
        dtype = torch.promote_types(q.dtype, torch.float32)
        slopes = alibi_slopes(self.num_heads, q.device).to(dtype)
        age = None if documents is None else documents.age
        return masked_softmax(q, cache.k, cache.v, slopes, age)
