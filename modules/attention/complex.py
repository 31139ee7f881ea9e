"""Complex linear attention, computed in real arithmetic."""

from dataclasses import dataclass

import torch
from einops import rearrange
from jaxtyping import Complex, Float, Shaped
from torch import Tensor, nn

from longhaul.modules.attention.base import Attention, RotaryConfig, register
from longhaul.modules.attention.gates import log_decays
from longhaul.modules.attention.power import GatedSum, Operands, PowerAttention, PowerConfig
from longhaul.modules.documents import Documents
from longhaul.modules.rotary import Rotary, rotate


@register("complex")
@dataclass(frozen=True, kw_only=True)
class ComplexConfig(RotaryConfig, PowerConfig):
    """The options of rotation and decay."""

    decay: bool = False
    """Decay by the fixed gates of retention, 1 - 2^(-5 - h) for head h = 0, 1, ..."""

    def build(self, model_dim: int, num_heads: int, layer: int = 0) -> Attention:
        return ComplexAttention(self, model_dim, num_heads)


class ComplexAttention(PowerAttention):
    """|y_n> = sum_m gamma^(n - m) <q_n| R^(n - m) |k_m> |v_m> / sqrt(K), R_j = exp(i theta_j)

    with q, k, v in C^(K / 2), then a norm per head. The inner product stays complex. Its phases
    are applied to q and k as rotations. A complex vector is stored as [real part, imaginary
    part]. Since <q|k> = q . [k_r, k_i] + i q . [k_i, -k_r], the sum is two gated sums:

        op(q, [k_r, k_i], [v_r, v_i]) + op(q, [k_i, -k_r], [-v_i, v_r])

    Source: Quantum-Inspired Linear Attention with Complex Embeddings.
    """

    num_sums = 2
    rotary: Rotary

    def __init__(self, config: ComplexConfig, model_dim: int, num_heads: int) -> None:
        super().__init__(config, model_dim, num_heads)
        self.decay = config.decay
        self.rotary = Rotary(self.head_dim, base=config.rotary_base)
        self.qkv = nn.Linear(model_dim, 3 * model_dim, bias=False)
        self.norm = nn.GroupNorm(num_heads, model_dim)

    def project(
        self, x: Float[Tensor, "B T D"], documents: Documents, carried: dict[str, Tensor]
    ) -> tuple[Operands, dict[str, Tensor]]:
        q, k, v = rearrange(self.qkv(x), "b t (s h k) -> s b t h k", s=3, h=self.num_heads)
        rotation = documents.positions(carried["rotation"])
        cos, sin = self.rotary.phases(rotation, documents.T, x.dtype)
        log_g = log_decays(x, self.num_heads) if self.decay else None
        # <q_n| R^(n - m) |k_m> is the inner product of R^-n q_n and R^-m k_m.
        sums = (GatedSum(log_g), GatedSum(log_g))
        operands = Operands(rotate(q, cos, -sin), rotate(k, cos, -sin), v, sums)
        return operands, {"rotation": documents.last(rotation)}

    def stack(self, operands: Operands) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        q = operands.q.repeat(1, 1, 2, 1)
        gate = operands.sums[0].log_g
        log_g = None if gate is None else gate.repeat(1, 1, 2)
        k_real, k_imaginary = operands.k.chunk(2, dim=-1)
        v_real, v_imaginary = operands.v.chunk(2, dim=-1)
        k = torch.cat([operands.k, torch.cat([k_imaginary, -k_real], dim=-1)], dim=2)
        v = torch.cat([operands.v, torch.cat([-v_imaginary, v_real], dim=-1)], dim=2)
        return q, k, v, log_g

    def weights(self, x: Float[Tensor, "B T D"]) -> Complex[Tensor, "B H T T"]:
        q, k, v, sums = self.operands(x)
        q, k = _complex(q) / self.key_dim**0.5, _complex(k)
        first = Operands(q.real, k.real, v, sums[:1])
        return torch.einsum("bthj,bihj->bhti", q.conj(), k) * self.coefficients(first)

    def values(self, x: Float[Tensor, "B T D"]) -> Complex[Tensor, "B T H J"]:
        return _complex(super().values(x))

    def read_out(
        self, x: Float[Tensor, "B T D"], mixed: Shaped[Tensor, "B T H J"]
    ) -> Float[Tensor, "B T D"]:
        if mixed.is_complex():
            mixed = torch.cat([mixed.real, mixed.imag], dim=-1)
        return super().read_out(x, mixed)


def _complex(x: Float[Tensor, "B T H K"]) -> Complex[Tensor, "B T H J"]:
    return torch.complex(*x.chunk(2, dim=-1))
