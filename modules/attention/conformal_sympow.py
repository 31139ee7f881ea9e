"""Conformal symmetric-power attention, the flagship: sympow + forget gate + learned rotary."""

from dataclasses import dataclass

from longhaul.modules.attention.base import Attention, LayerShape, register
from longhaul.modules.attention.parts.gates import GateConfig
from longhaul.modules.attention.sympow import RotationRate, Sympow, SympowOptions


@register("conformal_sympow")
@dataclass(frozen=True, kw_only=True)
class ConformalSympowConfig(GateConfig, SympowOptions):
    """The options of sympow but rotary, and the gate."""

    def build(self, shape: LayerShape) -> Attention:
        return ConformalSympow(self, shape)


class ConformalSympow(Sympow):
    """Sympow whose state is scaled and rotated by amounts that depend on the token.

        gamma_t = sigmoid(W_gamma x_t)            how much of the past to keep, one per head
        beta_t  = 1 + tanh(W_beta x_t)            how fast to rotate, one per layer
        mu_t    = mu_(t-1) + beta_t theta         theta_j = 2 pi / N^(2 (j - 1) / K)
        q'_t, k'_t = R(mu_t) q_t, R(mu_t) k_t

        w_ti = gamma_(i+1) ... gamma_t (q'_t . k'_i / sqrt(K))^p
        y_t  = sum_(i <= t) w_ti v_i / sum_(i <= t) w_ti

    which is, with phi(a) . phi(b) = (a . b)^p, a recurrence of constant size:

        S_t = gamma_t S_(t-1) + phi(k'_t) v_t^T        (symmetric_dim(K, p) x K numbers per head)
        z_t = gamma_t z_(t-1) + phi(k'_t)
        y_t = phi(q'_t)^T S_t / phi(q'_t)^T z_t

    A scaling times a rotation is a conformal map, hence the name. The gate frees capacity of the
    state, and the rotation chooses where in the state a token is stored. gates.py has the other
    choices of gamma. Rotations are those of the paper's equation (2); sections 3.2 and 3.3 write
    them in the other direction, which is a reflection of every plane and learns the same.
    Source: Conformal Transformations for Symmetric Power Transformers (2025), section 3.
    """

    def __init__(self, config: ConformalSympowConfig, shape: LayerShape) -> None:
        super().__init__(config, shape)
        self.gate = config.build_gate(shape.width, shape.key_heads)
        self.rate = RotationRate(shape.width)
