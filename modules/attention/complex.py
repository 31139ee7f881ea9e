"""Complex linear attention, computed in real arithmetic."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Complex, Float, Float64, Shaped
from torch import Tensor, nn

from longhaul.kernels.shapes import DENOMINATOR_FLOOR
from longhaul.modules.attention.base import (
    Attention,
    Float32Parameters,
    LayerShape,
    RotaryConfig,
    register,
)
from longhaul.modules.attention.parts.gates import log_decays
from longhaul.modules.attention.parts.vector_gates import Stacked, VectorGates
from longhaul.modules.attention.power import GatedSum, OpInputs, PowerConfig
from longhaul.modules.documents import Documents
from longhaul.modules.rotary import Rotary


@register("complex")
@dataclass(frozen=True, kw_only=True)
class ComplexConfig(RotaryConfig, PowerConfig):
    """The eigenvalues of the recurrence, and how the output is normalised."""

    decay: bool = False
    """Decay by the fixed gates of retention, 1 - 2^(-5 - h) for head h = 0, 1, ..."""

    learned_rates: bool = False
    """Learn the rotation rate of every pair of coordinates of a head, starting from theta_j."""

    learned_sizes: bool = False
    """Learn the size of every eigenvalue, below 1, starting from the fixed gates of `decay`."""

    normalizer: Literal["head_norm", "amplitudes"] = "head_norm"
    """head_norm (normalise each head's output) | amplitudes (divide by sqrt(sum_m |C_nm|^2))."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_whole_rotary("with kind complex, whose pairs are complex numbers")
        if self.learned_sizes and self.decay:
            raise ValueError(
                "decay: found true with learned_sizes, which starts from the same decays; wanted "
                "only one of them"
            )
        if self.learned_sizes and self.normalizer == "amplitudes":
            raise ValueError(
                "normalizer: found 'amplitudes' with learned_sizes, whose sums of |C_nm|^2 would "
                "need a decay for every two pairs of coordinates; wanted head_norm"
            )

    def build_rotary(self, width: int) -> Rotary | None:
        # <q_n| R^(n - m) |k_m> is the inner product of R^-n q_n and R^-m k_m.
        return self.rotary_with(width, base=self.rotary_base, backwards=True)

    def build(self, shape: LayerShape) -> Attention:
        return ComplexAttention(self, shape)


class Eigenvalues(Float32Parameters):
    """Learned eigenvalues alpha_j exp(i speed_j theta_j), for every head and pair j of coordinates.

    alpha_j = exp(-exp(nu_j)) is below 1 for any nu_j, as in Orvieto et al. (2023),
    arXiv:2303.06349; it starts as retention's gate of the head. The speed starts as 1: it is a
    ratio, so that pairs of all rates learn alike. Parameters are vectors, without weight decay,
    which would draw all speeds to 0.
    """

    def __init__(self, num_heads: int, num_pairs: int, *, speeds: bool, sizes: bool) -> None:
        """For key heads: the query heads of a key head share its eigenvalues, as its state."""
        super().__init__()
        self.num_heads = num_heads
        number = num_heads * num_pairs
        self.speed = nn.Parameter(torch.empty(number)) if speeds else None
        self.nu = nn.Parameter(torch.empty(number)) if sizes else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.speed is not None:
            nn.init.ones_(self.speed)
        if self.nu is not None:
            head = torch.arange(self.num_heads, dtype=torch.float64)
            decay = -torch.log1p(-(2.0 ** (-5 - head)))
            with torch.no_grad():
                self.nu.copy_(decay.log().repeat_interleave(self.nu.numel() // self.num_heads))

    def forward(self) -> tuple[Float64[Tensor, "H J"] | None, Float64[Tensor, "H J"] | None]:
        """The speeds, and log alpha; None where not learned."""
        # In float64 like the positions that multiply them, and no views, which FSDP warns of.
        speed, log_alpha = (
            None if one is None else one.unflatten(0, (self.num_heads, -1)).double()
            for one in (self.speed, self.nu)
        )
        return speed, None if log_alpha is None else -log_alpha.exp()


class ComplexAttention(VectorGates):
    """|y_n> = sum_m <q_n| R^(n - m) |k_m> |v_m> / sqrt(K), R = diag(alpha_j exp(i theta_j))

    with q, k, v in C^(K / 2), then a norm per head. The inner product C_nm exp(i phi) stays
    complex. Its phases are applied to q and k as rotations. A complex vector is stored as [real
    part, imaginary part]. Since <q|k> = q . [k_r, k_i] + i q . [k_i, -k_r], the sum is two gated
    sums:

        op(q, [k_r, k_i], [v_r, v_i]) + op(q, [k_i, -k_r], [-v_i, v_r])

    The eigenvalues are those of the source's matrix A. By default alpha_j = 1 and theta_j are the
    usual rates; `decay` makes alpha_j = gamma, one number a head; with learned_rates and
    learned_sizes they are parameters, which do not depend on the data, for every head and pair.
    Sizes are gates of the op, never folded into q and k, where alpha_j^(-m) would overflow.

    normalizer "amplitudes" divides by sqrt(sum_m C_nm^2) in place of the norm, so that the squares
    of the coefficients of v_m are a probability distribution. With k'_m for both forms of the key,
    sum_m (q . k'_m)^2 = q . sum_m (q . k'_m) k'_m: two further gated sums, whose values are the
    keys and whose gates are squared. Pivot tokens of a learned initial state take part in it.

    Source: Quantum-Inspired Linear Attention with Complex Embeddings: the eigenvalues in "Linear
    Attention as a Recurrent Model", the amplitudes in "Quantum-Inspired Complex Embeddings". It
    says nothing about 1 / sqrt(K), the eps of the norm, and how eigenvalues are learned.
    """

    def __init__(self, config: ComplexConfig, shape: LayerShape) -> None:
        super().__init__(config, shape)
        self.decay = config.decay
        self.has_amplitudes = config.normalizer == "amplitudes"
        # The sum of squares is a product with q, in which 16 bits may cancel.
        self.in_float32 = self.has_amplitudes
        self.num_sums = 4 if self.has_amplitudes else 2
        self.scale = self.head_dim**-0.5
        self.add_qkv(config.build_rotary)
        pairs = self.head_dim // 2
        self.eigenvalues = None
        if config.learned_rates or config.learned_sizes:
            self.eigenvalues = Eigenvalues(
                self.num_key_heads, pairs, speeds=config.learned_rates, sizes=config.learned_sizes
            )
        if config.learned_sizes:
            self.split_heads(pairs)
        if not self.has_amplitudes:
            self.norm = nn.GroupNorm(shape.heads, shape.mixed_width)

    def project(
        self, x: Float[Tensor, "B T D"], documents: Documents, carried: dict[str, Tensor]
    ) -> tuple[OpInputs, dict[str, Tensor]]:
        rotation = documents.positions(carried["rotation"])
        speed, log_g = (None, None) if self.eigenvalues is None else self.eigenvalues()
        q, k, v = self.queries_keys_values(x, rotation, documents.T, speed, qkv=carried.get("qkv"))
        if log_g is not None:
            dtype = torch.promote_types(x.dtype, torch.float32)
            log_g = log_g.to(dtype).expand(*x.shape[:2], -1, -1)
            # A head of one pair has no parts.
            log_g = log_g[..., 0] if self.num_parts == 1 else log_g
        if self.decay:
            log_g = log_decays(x, self.num_key_heads)
        sums: tuple[GatedSum, ...] = (GatedSum(log_g),) * 2
        if self.has_amplitudes:
            sums += (GatedSum(None if log_g is None else 2 * log_g),) * 2
        operands = OpInputs(q, k, v.to(q.dtype), sums)
        return operands, {"rotation": documents.last(rotation)}

    def stack(self, operands: OpInputs) -> Stacked:
        keys = _keys(operands.k)
        v_real, v_imaginary = operands.v.chunk(2, dim=-1)
        values = [operands.v, torch.cat([-v_imaginary, v_real], dim=-1)]
        if self.has_amplitudes:
            values += keys
            keys += keys
        gates = [one.log_g for one in operands.sums if one.log_g is not None]
        return self.parts(
            operands.q.repeat(1, 1, len(keys), 1),
            torch.cat(keys, dim=2),
            torch.cat(values, dim=2),
            torch.cat(gates, dim=2) if gates else None,
        )

    def merge(self, out: Float[Tensor, "B T NH V"], operands: OpInputs) -> Tensor:
        if not self.has_amplitudes:
            return super().merge(out, operands)
        first, second, *products = out.chunk(4, dim=2)
        squares = (operands.q * (products[0] + products[1])).sum(dim=-1, keepdim=True)
        # A product has the scale once, a square has it twice.
        total: Tensor = (self.head_dim**-0.5 * squares).clamp(DENOMINATOR_FLOOR)
        return (first + second) * total.rsqrt()

    def weights(self, x: Float[Tensor, "B T D"]) -> Complex[Tensor, "B H T T"]:
        operands = self.of_query_heads(self.operands(x))
        real, imaginary = (
            self.part_weights(OpInputs(operands.q, k, operands.v, operands.sums)).sum(dim=2)
            for k in _keys(operands.k)
        )
        weights = torch.complex(real, imaginary)
        if not self.has_amplitudes:
            return weights
        squares = weights.abs().square().sum(dim=-1, keepdim=True)
        return weights * squares.clamp(DENOMINATOR_FLOOR).rsqrt()

    def values(self, x: Float[Tensor, "B T D"]) -> Complex[Tensor, "B T H J"]:
        return _complex(super().values(x))

    def read_out(
        self, x: Float[Tensor, "B T D"], mixed: Shaped[Tensor, "B T H J"]
    ) -> Float[Tensor, "B T D"]:
        if mixed.is_complex():
            mixed = torch.cat([mixed.real, mixed.imag], dim=-1)
        return super().read_out(x, mixed)


def _keys(k: Float[Tensor, "B T H K"]) -> list[Tensor]:
    """What q is multiplied with for the real and the imaginary part of <q|k>."""
    real, imaginary = k.chunk(2, dim=-1)
    return [k, torch.cat([imaginary, -real], dim=-1)]


def _complex(x: Float[Tensor, "B T H K"]) -> Complex[Tensor, "B T H J"]:
    return torch.complex(*x.chunk(2, dim=-1))
