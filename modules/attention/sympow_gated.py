"""Symmetric-power attention with a forget gate: sympow + gating."""

from dataclasses import dataclass

from longhaul.modules.attention.base import Attention, register
from longhaul.modules.attention.gates import ForgetGate, ForgetGateConfig
from longhaul.modules.attention.sympow import Sympow, SympowConfig


@register("sympow_gated")
@dataclass(frozen=True, kw_only=True)
class SympowGatedConfig(ForgetGateConfig, SympowConfig):
    """The options of sympow, and of its forget gate."""

    def build(self, model_dim: int, num_heads: int, layer: int = 0) -> Attention:
        return SympowGated(self, model_dim, num_heads)


class SympowGated(Sympow):
    """Sympow with w_ti = gamma_(i+1) ... gamma_t (q_t . k_i)^p, gamma_t = sigmoid(W x_t).

    The gate is one scalar per head and token; gates.py says when it has a bias. The denominator has
    the same gate.
    Source: Conformal Transformations for Symmetric Power Transformers (2025), section 3.1.
    """

    def __init__(self, config: SympowGatedConfig, model_dim: int, num_heads: int) -> None:
        super().__init__(config, model_dim, num_heads)
        self.gate = ForgetGate(model_dim, num_heads, config.gate_init)
