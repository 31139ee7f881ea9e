"""Forgetting attention (FoX): softmax attention with a forget gate."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from longhaul.kernels.common.segments import sum_within
from longhaul.modules.attention.base import Attention, LayerShape, PartsConfig, register
from longhaul.modules.attention.fused import Cache, FusedAttention, GatedCache
from longhaul.modules.attention.parts.gates import ForgetGate, ForgetGateConfig, ScalarPerHead
from longhaul.modules.attention.parts.masked_softmax import masked_softmax
from longhaul.modules.attention.parts.short_convolution import with_past
from longhaul.modules.documents import Documents


@register("fox")
@dataclass(frozen=True, kw_only=True)
class FoxConfig(PartsConfig, ForgetGateConfig):
    """Forgetting attention; its gate is that of the gated kinds.

    Its published pro form has shift true, output_norm rms, output_gate sigmoid, and
    model.qk_norm head.
    """

    cost: ClassVar[str] = "quadratic"

    shift: bool = False
    """Whether each key and value is mixed with that of the token before, by a learned share."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shift and self.short_convolution:
            raise ValueError(
                f"short_convolution: found {self.short_convolution} with shift, which mixes tokens "
                "too; wanted 0"
            )

    def build(self, shape: LayerShape) -> Attention:
        return Fox(self, shape)


class Fox(FusedAttention):
    """y_t = sum_i softmax_i(q_t . k_i / sqrt(K) + log f_(i+1) + ... + log f_t) v_i.

    f_t = sigmoid(W x_t + b), one per query head, b = 0 at first; there are no other positions.
    With a shift, a_t k_(t-1) + (1 - a_t) k_t stands for k_t, before its norm, and likewise for v_t;
    a_t = sigmoid(w x_t), one w for the keys and one for the values of each key head. Before the
    first token of a document are zeros.
    Source: Lin et al. (2025), "Forgetting Transformer", arXiv:2503.02130.
    """

    def __init__(self, config: FoxConfig, shape: LayerShape) -> None:
        super().__init__(config, shape)
        self.gate = ForgetGate(shape.width, shape.heads, config.gate_init)
        self.key_shift: ScalarPerHead | None = None
        self.value_shift: ScalarPerHead | None = None
        if config.shift:
            self.key_shift = ScalarPerHead(shape.width, shape.key_heads)
            self.value_shift = ScalarPerHead(shape.width, shape.key_heads)
        self.add_qkv()

    def projected(
        self,
        x: Float[Tensor, "B T D"],
        documents: Documents,
        convolved: Float[Tensor, "B past channels"] | None = None,
    ) -> tuple[Float[Tensor, "B T W"], Float[Tensor, "B past channels"] | None]:
        if self.key_shift is None or self.value_shift is None:
            return super().projected(x, documents, convolved)
        queries, *shifted = self.qkv_widths
        q, kv = getattr(self, self.qkv_name)(x).split([queries, sum(shifted)], dim=-1)
        inputs = with_past(kv, documents, convolved, 1)
        before = inputs[:, :-1]
        if documents.age is not None:
            before = torch.where(documents.age[..., None] > 0, before, 0)
        share = torch.cat([self.key_shift(x), self.value_shift(x)], dim=-1).sigmoid()
        share = share.repeat_interleave(self.head_dim, dim=-1)
        kv = (kv + share * (before - kv)).to(kv.dtype)
        # A view would keep all inputs in memory.
        return torch.cat([q, kv], dim=-1), inputs[:, -1:].clone()

    def num_convolved(self) -> int:
        return super().num_convolved() if self.key_shift is None else sum(self.qkv_widths[1:])

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
