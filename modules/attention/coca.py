"""Collinear constrained attention (CoCA): keys collinear with every query, in one fused call."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from longhaul.kernels.rotary import rotate
from longhaul.modules.attention.base import (
    Attention,
    DocumentRotaryConfig,
    LayerShape,
    PartsConfig,
    register,
)
from longhaul.modules.attention.fused import FusedAttention, KeyValueCache
from longhaul.modules.rotary import Rotary


@register("coca")
@dataclass(frozen=True, kw_only=True)
class CocaConfig(DocumentRotaryConfig, PartsConfig):
    """The rotary options of softmax, and which of the two versions of CoCA."""

    cost: ClassVar[str] = "quadratic"

    mode: Literal["strict", "slack"] = "strict"
    """strict (the paper's formula) | slack (what the released code computes)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_whole_rotary("with kind coca, whose keys are made of the pairs of queries")

    def build(self, shape: LayerShape) -> Attention:
        return Coca(self, shape)


class Coca(FusedAttention):
    """Softmax attention in which the key for query m is q_m times non-negative coefficients.

        t_n = relu((u_first + u_second) / 2), u = W_t x_n     (K / 2 numbers per key head)

    strict: the key q_m o [t_n, t_n] (eq. 6) is rotated by n. Query and key have the same angle
    before rotation, which cancels. So the logit depends on positions through m - n only, and
    equals that of ordinary rotary attention:

        logit_mn = sum_j |q_m,j|^2 t_n,j cos((m - n) theta_j)
                 = RoPE_m([|q_m|^2, 0]) . RoPE_n([t_n, 0])

    slack: the coefficients are rotated first and multiplied by q_m afterwards (eqs. 7 and 8,
    element by element, as in the released code). The logit then depends on more than m - n:

        logit_mn = RoPE_m(q_m) . (q_m o RoPE_n([t_n, t_n]))
                 = (q_m o RoPE_m(q_m)) . RoPE_n([t_n, t_n])

    Positions count from 0 (eq. 1: n in [0, c), as in the released code), which decides the weights
    of slack. Logits are divided by sqrt(K). The cache holds t, which is half as wide as keys.
    Source: CoCA, Zhu et al. (2023), arXiv:2309.08646, sections 2.1 and 2.4.
    """

    qkv_name = "qtv"  # as in checkpoints
    rotary: Rotary

    def __init__(self, config: CocaConfig, shape: LayerShape) -> None:
        super().__init__(config, shape)
        self.is_strict = config.mode == "strict"
        self.add_qkv(config.build_rotary)

    def project(
        self,
        x: Float[Tensor, "B T D"],
        position: Float64[Tensor, "#B T"],
        qkv: Float[Tensor, "B T W"] | None = None,
    ) -> tuple[Float[Tensor, "B H T K"], KeyValueCache]:
        q, u, v = (one.transpose(1, 2) for one in self.queries_keys_values(x, qkv=qkv))
        first, second = u.chunk(2, dim=-1)
        return q, KeyValueCache(((first + second) / 2).relu(), v)

    def operands(
        self,
        q: Float[Tensor, "B H T K"],
        k: Float[Tensor, "B G S J"],
        position: Float64[Tensor, "#B S"],
    ) -> tuple[Float[Tensor, "B H T K"], Float[Tensor, "B G S K"]]:
        T, S = q.shape[2], k.shape[2]
        phases = self.rotary.phases(position - 1, self.whole_length(T, S), q.dtype)
        cos, sin = (phase.transpose(1, 2) for phase in phases)
        now = cos[:, :, S - T :], sin[:, :, S - T :]
        if self.is_strict:
            first, second = q.chunk(2, dim=-1)
            squared_norm = first.square() + second.square()
            zeros = torch.zeros_like(squared_norm)
            queries = rotate(torch.cat([squared_norm, zeros], dim=-1), *now)
            # The rotation of [t, 0], whose second half is zero.
            return queries, torch.cat([k * cos, k * sin], dim=-1).to(q.dtype)
        return q * rotate(q, *now), rotate(torch.cat([k, k], dim=-1), cos, sin)
