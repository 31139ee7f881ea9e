"""Forgetting attention (FoX): softmax attention with a forget gate."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from longhaul.kernels.common.segments import sum_within
from longhaul.modules.attention.base import Attention, LayerShape, PartsConfig, register
from longhaul.modules.attention.fused import Cache, FusedAttention, GatedCache
from longhaul.modules.attention.parts.gates import ForgetGate, ForgetGateConfig
from longhaul.modules.attention.parts.masked_softmax import masked_softmax
from longhaul.modules.documents import Documents


@register("fox")
@dataclass(frozen=True, kw_only=True)
class FoxConfig(PartsConfig, ForgetGateConfig):
    """Forgetting attention; its gate is that of the gated kinds."""

    cost: ClassVar[str] = "quadratic"

    def build(self, shape: LayerShape) -> Attention:
        return Fox(self, shape)


class Fox(FusedAttention):
    """y_t = sum_i softmax_i(q_t . k_i / sqrt(K) + log f_(i+1) + ... + log f_t) v_i.

    f_t = sigmoid(W x_t + b), one per query head, b = 0 at first; there are no other positions.
    Source: Lin et al. (2025), "Forgetting Transformer", arXiv:2503.02130.
    """

    def __init__(self, config: FoxConfig, shape: LayerShape) -> None:
        super().__init__(config, shape)
        self.gate = ForgetGate(shape.width, shape.heads, config.gate_init)
        self.add_qkv()

    def project(
        self,
        x: Float[Tensor, "B T D"],
        position: Float64[Tensor, "#B T"],
        qkv: Float[Tensor, "B T W"] | None = None,
    ) -> tuple[Float[Tensor, "B H T K"], GatedCache]:
        q, cache = super().project(x, position, qkv)
        return q, GatedCache(cache.k, cache.v, self.gate(x).mT[..., None])

    def logits(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B H T T"]:
        logits = super().logits(x)
        decay = _decay(self.gate(x).mT)
        return logits + (decay[..., None] - decay[:, :, None]).to(logits.dtype)

    def log_gates(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T H"]:
        log_f: Tensor = self.gate(x)
        return log_f

    def mix(
        self,
        q: Float[Tensor, "B H T K"],
        cache: Cache,
        position: Float64[Tensor, "#B S"],
        documents: Documents | None = None,
    ) -> Float[Tensor, "B H T V"]:
        assert isinstance(cache, GatedCache)
        k, v, log_f = cache
        if documents is None:
            return masked_softmax(q, k, v, None, None, decay=_decay(log_f[..., 0]))
        # Sums that begin with each document, so that none has the rounding of those before it.
        age = position.long() - 1
        sums = sum_within(log_f[..., 0].mT.double(), age).mT
        return masked_softmax(q, k, v, None, documents.age, decay=sums)


def _decay(log_f: Float[Tensor, "B H S"]) -> Float64[Tensor, "B H S"]:
    """The running sums of log gates, in float64: those of long rows are large."""
    return torch.cumsum(log_f, dim=2, dtype=torch.float64)
