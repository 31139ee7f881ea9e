"""Mamba-2: a state-space model with a scalar decay per head, as a layer of attention."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from longhaul.modules.attention.base import Attention, LayerShape, register
from longhaul.modules.attention.parts.gates import ScalarPerHead
from longhaul.modules.attention.parts.qkv import check_groups
from longhaul.modules.attention.parts.time_step import TimeStep
from longhaul.modules.attention.power import GatedSum, OpInputs, PowerAttention, PowerConfig
from longhaul.modules.choices import check_bounds
from longhaul.modules.documents import Documents


@register("mamba2")
@dataclass(frozen=True, kw_only=True)
class Mamba2Config(PowerConfig):
    """Sizes of the state, and of what is mixed."""

    expand: int = 2
    """Heads for each head of the model, and as wide: 1 or more. All are expand x D wide."""

    key_dim: int = 128
    """Width of keys and queries, which Mamba-2 calls the state size N, 1 or more."""

    groups: int = 1
    """Keys and queries per token, 1 or more, a divisor of the heads, which share them."""

    output_norm: Literal["none", "rms"] = "rms"
    """none | rms (the gated output of each group of heads is divided by its root mean square)."""

    output_gate: Literal["none", "silu", "sigmoid"] = "silu"
    """none | silu | sigmoid: of one more projection of x, which multiplies the output."""

    short_convolution: int = 4
    """Tokens that a convolution of queries, keys and values reads, with silu; 0: there is none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self, "expand", "key_dim", "groups", least=1)

    def build(self, shape: LayerShape) -> Attention:
        return Mamba2(self, shape)


class Mamba2(PowerAttention):
    """h_t = e^(-A dt_t) h_(t-1) + dt_t v_t k_t^T, y_t = h_t q_t + D v_t, one A and D per head.

    q, k and v, which the article calls C, B and x, are silu of a short convolution of projections;
    dt_t = softplus(W x_t + b). Then the output is RMSNorm(y * silu(z)), z a projection. It is power
    attention of degree 1 without its denominator, whose gates are e^(-A dt) and whose values are
    scaled by dt. Heads are the model's, `expand` times as many.
    Source: Dao and Gu (2024), arXiv:2405.21060, and the layer that they published.
    """

    scale = 1.0
    groups_keys = False
    convolution_bias = True

    def __init__(self, config: Mamba2Config, shape: LayerShape) -> None:
        heads = config.expand * shape.heads
        self.groups = self.norm_groups = check_groups(config.groups, heads)
        self.state_dim = config.key_dim
        if shape.key_heads == shape.heads:  # else refused, by the model's own heads
            shape = replace(shape, heads=heads, key_heads=heads)
        super().__init__(config, shape)
        self.add_qkv()
        self.step_size = ScalarPerHead(shape.width, heads)
        self.time_step = TimeStep(heads, rates=(1.0, 16.0))
        self.skip = nn.Parameter(torch.ones(heads))  # D

    def head_shapes(self) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        keys = self.groups, self.state_dim
        return keys, keys, (self.num_heads, self.head_dim)

    def op_widths(self) -> tuple[int, int]:
        return self.state_dim, self.head_dim

    def project(
        self, x: Float[Tensor, "B T D"], documents: Documents, carried: dict[str, Tensor]
    ) -> tuple[OpInputs, dict[str, Tensor]]:
        q, k, v = self.queries_keys_values(x, qkv=carried.get("qkv"))
        # Every head has gates, and so a state, of its own.
        q, k = (one.repeat_interleave(self.num_heads // self.groups, dim=2) for one in (q, k))
        dt, log_g = self.time_step(self.step_size(x))
        return OpInputs(q, k, v, (GatedSum(log_g, dt[..., None]),)), {}

    def merge(self, out: Float[Tensor, "B T H V"], operands: OpInputs) -> Tensor:
        return super().merge(out, operands) + self.skip[:, None] * operands.v

    def weights(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B H T T"]:
        return super().weights(x) + self.skip[:, None, None] * torch.eye(
            x.shape[1], dtype=x.dtype, device=x.device
        )
