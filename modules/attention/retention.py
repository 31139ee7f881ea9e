"""Retention: linear attention with a fixed decay per head."""

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.nn.functional import silu

from longhaul.modules.attention.base import Attention, LayerShape, RotaryConfig, register
from longhaul.modules.attention.parts.gates import log_decays
from longhaul.modules.attention.power import GatedSum, OpInputs, PowerAttention, PowerConfig
from longhaul.modules.documents import Documents
from longhaul.modules.rotary import Rotary


@register("retention")
@dataclass(frozen=True, kw_only=True)
class RetentionConfig(RotaryConfig, PowerConfig):
    """The norm and the gate after the retention, and its rotation."""

    group_norm: bool = True
    """Normalise the output of each head."""

    rotary: Literal["fixed", "none"] = "fixed"
    """fixed (rotate queries and keys by their positions) | none (rotary_base is not read)."""

    swish_gate: bool = False
    """As output_gate silu, after the group norm alone: W_g is one more matrix, D x H K."""

    def build_rotary(self, width: int) -> Rotary | None:
        return super().build_rotary(width) if self.rotary == "fixed" else None

    def build(self, shape: LayerShape) -> Attention:
        return Retention(self, shape)


class Retention(PowerAttention):
    """y_t = sum_i gamma_h^(t - i) (q_t . k_i / sqrt(K)) v_i, gamma_h = 1 - 2^(-5 - h), h = 0, 1 ...

    where q and k are rotated by their positions. Group norm and swish(W_g x) follow if configured.
    The norm is torch's: it subtracts the mean, and has a gain and a bias for every channel.
    Source: Sun et al. (2023), arXiv:2307.08621.
    """

    def __init__(self, config: RetentionConfig, shape: LayerShape) -> None:
        super().__init__(config, shape)
        self.add_qkv(config.build_rotary)
        self.swish = shape.projection(shape.mixed_width) if config.swish_gate else None
        if config.group_norm:
            self.norm = nn.GroupNorm(shape.heads, shape.mixed_width)

    def project(
        self, x: Float[Tensor, "B T D"], documents: Documents, carried: dict[str, Tensor]
    ) -> tuple[OpInputs, dict[str, Tensor]]:
        rotation, after = None, {}
        if self.rotary is not None:
            rotation = documents.positions(carried["rotation"])
            after = {"rotation": documents.last(rotation)}
        q, k, v = self.queries_keys_values(x, rotation, documents.T, qkv=carried.get("qkv"))
        return OpInputs(q, k, v, (GatedSum(log_decays(x, self.num_key_heads)),)), after

    def read_out(
        self, x: Float[Tensor, "B T D"], mixed: Shaped[Tensor, "B T H V"]
    ) -> Float[Tensor, "B T D"]:
        y = self.normed(mixed.flatten(2)).to(x.dtype)
        if self.swish is not None:
            y = y * silu(self.swish(x))
        return self.project_output(x, y)
