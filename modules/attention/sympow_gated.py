"""Symmetric-power attention with a forget gate: sympow + gating."""

from dataclasses import dataclass

from longhaul.modules.attention.base import Attention, LayerShape, register
from longhaul.modules.attention.parts.gates import GateConfig
from longhaul.modules.attention.sympow import Sympow, SympowConfig


@register("sympow_gated")
@dataclass(frozen=True, kw_only=True)
class SympowGatedConfig(GateConfig, SympowConfig):
    """The options of sympow, and its gate."""

    def build(self, shape: LayerShape) -> Attention:
        return SympowGated(self, shape)


class SympowGated(Sympow):
    """Sympow with w_ti = gamma_(i+1) ... gamma_t (q_t . k_i)^p, gamma_t = sigmoid(W x_t).

    The gate is one scalar per head and token, and the denominator has the same gate; gates.py says
    when it has a bias. A gate may also be one number per head, learned or fixed: with gate alibi,
    w_ti = exp(-m_h (t - i)) (q_t . k_i)^p.
    Source: Conformal Transformations for Symmetric Power Transformers (2025), sections 3.1 and A.1.
    """

    def __init__(self, config: SympowGatedConfig, shape: LayerShape) -> None:
        super().__init__(config, shape)
        self.gate = config.build_gate(shape.width, shape.key_heads)
