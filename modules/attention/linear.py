"""Linear attention: the product of feature maps replaces the exponential."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from longhaul.modules.attention.base import Attention, LayerShape, RotaryConfig, register
from longhaul.modules.attention.parts.gates import ForgetGate, ForgetGateConfig
from longhaul.modules.attention.power import GatedSum, OpInputs, PowerAttention, PowerConfig
from longhaul.modules.documents import Documents
from longhaul.modules.rotary import Rotary


@register("linear")
@dataclass(frozen=True, kw_only=True)
class LinearConfig(ForgetGateConfig, RotaryConfig, PowerConfig):
    """The feature map, how the output is normalised, and whether there are positions and a gate."""

    feature_map: Literal["elu", "relu", "identity"] = "elu"
    """elu (elu(x) + 1) | relu | identity: the function applied to queries and keys."""

    normalizer: Literal["sum", "head_norm"] = "sum"
    """sum (divide by the sum of the weights) | head_norm (normalise each head's output)."""

    rotary: Literal["none", "fixed"] = "none"
    """none (rotary_base is not read) | fixed (rotate queries and keys, before the feature map)."""

    gate: Literal["none", "data"] = "none"
    """none | data (sigmoid(W x), a scalar per head and token)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.feature_map == "identity" and self.normalizer == "sum":
            raise ValueError(
                "normalizer: found 'sum' with feature_map identity, whose weights may sum to zero; "
                "wanted head_norm"
            )

    def build_rotary(self, width: int) -> Rotary | None:
        return super().build_rotary(width) if self.rotary == "fixed" else None

    def build(self, shape: LayerShape) -> Attention:
        return Linear(self, shape)


class Linear(PowerAttention):
    """y_t = sum_i f(q_t) . f(k_i) v_i / sum_i f(q_t) . f(k_i).

    With normalizer head_norm: the numerator / sqrt(K), then a norm per head. Without rotary and
    gate there are no positions: tokens differ only in their content and in how many precede them.

    With rotary, f(R_t q_t) . f(R_i k_i) takes the place of f(q_t) . f(k_i); with a gate, the
    weights are multiplied by gamma_(i+1) ... gamma_t. The symmetric-power article has rotary linear
    transformers as its baseline without a formula; its section 1 turns Q into R Q, so R stands
    before f. Weights then stay non-negative, but depend on t - i alone only if f is the identity.
    (RoFormer, arXiv:2104.09864, rotates f(q) and f(k) instead, in the numerator alone.)
    Source: Katharopoulos et al. (2020), arXiv:2006.16236, where f = elu + 1.
    """

    def __init__(self, config: LinearConfig, shape: LayerShape) -> None:
        super().__init__(config, shape)
        self.feature_map = config.feature_map
        self.normalize = config.normalizer == "sum"
        self.gate = None
        if config.gate == "data":
            self.gate = ForgetGate(shape.width, shape.key_heads, config.gate_init)
        self.add_qkv(config.build_rotary)
        if config.normalizer == "head_norm":
            self.norm = nn.GroupNorm(shape.heads, shape.mixed_width)

    def project(
        self, x: Float[Tensor, "B T D"], documents: Documents, carried: dict[str, Tensor]
    ) -> tuple[OpInputs, dict[str, Tensor]]:
        rotation, after = None, {}
        if self.rotary is not None:
            rotation = documents.positions(carried["rotation"])
            after = {"rotation": documents.last(rotation)}
        q, k, v = self.queries_keys_values(x, rotation, documents.T, qkv=carried.get("qkv"))
        sums = (GatedSum(None if self.gate is None else self.gate(x)),)
        return OpInputs(self._features(q), self._features(k), v, sums), after

    def pivot_key(self, key: Float[Tensor, "1 R H K"]) -> Float[Tensor, "1 R H K"]:
        # Weights of pivot tokens must not be negative either, or the sum of weights could be zero.
        return self._features(key)

    def _features(self, x: Tensor) -> Tensor:
        if self.feature_map == "identity":
            return x
        if self.feature_map == "relu":
            return F.relu(x)
        # elu(x) + 1 for x < 0 is exp(x). Computed as a sum, 16 bits would round it to 0 at x < -6.
        return torch.where(x > 0, x + 1, x.clamp(max=0).exp())
