"""Linear attention: the product of feature maps replaces the exponential."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from longhaul.modules.attention.base import Attention, register
from longhaul.modules.attention.power import Operands, PowerAttention, PowerConfig
from longhaul.modules.documents import Documents


@register("linear")
@dataclass(frozen=True, kw_only=True)
class LinearConfig(PowerConfig):
    """The feature map, and how the output is normalised."""

    feature_map: str = "elu"
    """elu (elu(x) + 1) | relu | identity: the function applied to queries and keys."""

    normalizer: str = "sum"
    """sum (divide by the sum of the weights) | head_norm (normalise each head's output)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.feature_map not in ("elu", "relu", "identity"):
            raise ValueError(
                f"feature_map: found {self.feature_map!r}, wanted one of elu, relu, identity"
            )
        if self.normalizer not in ("sum", "head_norm"):
            raise ValueError(f"normalizer: found {self.normalizer!r}, wanted sum or head_norm")
        if self.feature_map == "identity" and self.normalizer == "sum":
            raise ValueError(
                "normalizer: found 'sum' with feature_map identity, whose weights may sum to zero; "
                "wanted head_norm"
            )

    def build(self, model_dim: int, num_heads: int, layer: int = 0) -> Attention:
        return Linear(self, model_dim, num_heads)


class Linear(PowerAttention):
    """y_t = sum_i f(q_t) . f(k_i) v_i / sum_i f(q_t) . f(k_i).

    With normalizer head_norm: the numerator / sqrt(K), then a norm per head. There are no
    positions: tokens differ only in their content and in how many tokens precede them.
    Source: Katharopoulos et al. (2020), arXiv:2006.16236 (f = elu + 1).
    """

    def __init__(self, config: LinearConfig, model_dim: int, num_heads: int) -> None:
        super().__init__(config, model_dim, num_heads)
        self.feature_map = config.feature_map
        self.normalize = config.normalizer == "sum"
        self.qkv = nn.Linear(model_dim, 3 * model_dim, bias=False)
        if config.normalizer == "head_norm":
            self.norm = nn.GroupNorm(num_heads, model_dim)

    def project(
        self, x: Float[Tensor, "B T D"], documents: Documents, carried: dict[str, Tensor]
    ) -> tuple[Operands, dict[str, Tensor]]:
        q, k, v = rearrange(self.qkv(x), "b t (s h k) -> s b t h k", s=3, h=self.num_heads)
        return Operands(self._features(q), self._features(k), v), {}

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
