"""Power delta: the delta rule on the features of symmetric-power attention."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.linalg import solve_triangular
from torch.utils.checkpoint import checkpoint

from longhaul.kernels.common.custom_ops import without_autocast
from longhaul.kernels.delta.cost import choose_chunk_size
from longhaul.modules.attention.base import Attention, DocumentRotaryConfig, LayerShape, register
from longhaul.modules.attention.parts.gates import GateConfig
from longhaul.modules.attention.recurrent.delta import DeltaAttention, DeltaConfig
from longhaul.modules.rotary import Rotary


@register("power_delta")
@dataclass(frozen=True, kw_only=True)
class PowerDeltaConfig(GateConfig, DocumentRotaryConfig, DeltaConfig):
    """The gate and rotation of sympow_gated, and the delta rule."""

    positions: ClassVar[tuple[str, ...]] = ("none", "linear")

    longest_document: int | None = 65_536
    """N of theta_j = 2 pi / N^(2 (j - 1) / K), in tokens, 2 or more; null: rotary_base is used."""

    rotary: Literal["fixed", "none"] = "fixed"
    """fixed (rotate queries and keys by their positions) | none (longest_document is not read)."""

    short_convolution: int = 0
    """Tokens that a convolution of queries, keys and values reads, with silu; 0: there is none."""

    output_gate: Literal["none", "silu", "sigmoid"] = "none"
    """none | silu | sigmoid: of one more projection of x, which multiplies the output."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backend != "auto":
            raise ValueError(f"backend: found {self.backend!r}, wanted 'auto': nobody else has it")

    def build_rotary(self, width: int) -> Rotary | None:
        return super().build_rotary(width) if self.rotary == "fixed" else None

    def build(self, shape: LayerShape) -> Attention:
        return PowerDelta(self, shape)


class PowerDelta(DeltaAttention):
    """S_t = gamma_t S_(t-1), S_t += b_t phi(k_t) (v_t - S_t^T phi(k_t))^T, y_t = S_t^T phi(q_t).

    phi(a) . phi(b) = (a . b)^2, as in sympow of degree 2: its state, of K (K + 1) / 2 rows, where
    what is held under a key is erased before its value is written. |q_t|, |k_t| and so |phi(k_t)|
    are 1. A norm of each head takes the place of sympow's denominator.

    In a chunk that begins with the state S, with A_t = gamma_1 ... gamma_t, the new values
    w_t = b_t (v_t - what is held) solve a triangular system,

        w_t + sum_(i < t) b_t (A_t / A_i) (k_i . k_t)^2 w_i = b_t (v_t - A_t S^T phi(k_t))

    so that features are needed for the products with S alone. They are made a chunk at a time, and
    made again in the backward pass. Nobody has published this kind.
    """

    scale = 1.0

    def __init__(self, config: PowerDeltaConfig, shape: LayerShape) -> None:
        super().__init__(config, shape)
        self.gate = config.build_gate(shape.width, shape.heads)

    def log_gates(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T H"]:
        return self.gate(x)  # type: ignore[no-any-return]

    @property
    def num_features(self) -> int:
        return self.key_dim * (self.key_dim + 1) // 2

    def features(self, x: Float[Tensor, "B T H K"]) -> Float[Tensor, "B T H P"]:
        """All products of two coordinates; those of two different ones count twice."""
        first, second = torch.triu_indices(x.shape[-1], x.shape[-1], device=x.device)
        times = torch.where(first == second, 1, 2).to(x.dtype)
        return x[..., first] * x[..., second] * times.sqrt()

    def _mix(
        self,
        q: Float[Tensor, "B T H K"],
        k: Float[Tensor, "B T H K"],
        v: Float[Tensor, "B T H V"],
        beta: Float[Tensor, "B T H"] | None,
        log_g: Float[Tensor, "B T H *channels"] | None,
        memory: Float[Tensor, "B H P V"] | None,
        keep_state: bool,
    ) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "B H P V"] | None]:
        assert beta is not None
        assert log_g is not None
        exact = torch.promote_types(v.dtype, torch.float32)
        size = self.chunk_size or choose_chunk_size(v.shape[1])
        chunks = zip(
            *(
                one.to(exact).transpose(1, 2).split(size, dim=2)
                for one in (q, k, v, beta[..., None], log_g[..., None])
            ),
            strict=True,
        )
        if memory is None:
            B, _, H, V = v.shape
            memory = v.new_zeros(B, H, self.num_features, V, dtype=exact)
        outputs = []
        with without_autocast(v):
            for chunk in chunks:
                out, memory = checkpoint(
                    self._chunk, memory, *chunk, use_reentrant=False, preserve_rng_state=False
                )
                outputs.append(out)
        return torch.cat(outputs, dim=2).transpose(1, 2).to(v.dtype), memory if keep_state else None

    def _chunk(
        self, memory: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_g: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Outputs (B, H, C, V) of a chunk, and the state after it."""
        C = q.shape[2]
        gates = log_g.exp()
        later = torch.ones(C, C, dtype=torch.bool, device=q.device).tril(-1)
        decay = torch.where(later, gates, 1).cumprod(dim=2).tril()  # A_t / A_i
        from_start = gates.cumprod(dim=2)
        phi_q, phi_k = self.features(q), self.features(k)
        system = (beta * decay * (k @ k.mT).square()).tril(-1)
        held = from_start * (phi_k @ memory)
        w = solve_triangular(system, beta * (v - held), upper=False, unitriangular=True)
        out = from_start * (phi_q @ memory) + (decay * (q @ k.mT).square()) @ w
        return out, from_start[:, :, -1:] * memory + (decay[:, :, -1:].mT * phi_k).mT @ w

    def check_context_parallel(self) -> None:
        # With heads of 64, the transition of a part has 2,080 columns beside 64 of values: to make
        # it takes 22 times the products with the state that the layer itself takes.
        P = self.num_features
        raise ValueError(
            f"attention.kind: found power_delta, whose ranks would exchange {P:,} x {P:,} numbers "
            f"for each head and sequence ({4 * P**2:,} bytes); wanted a kind that supports context "
            "parallelism"
        )

    def mixing_flops(self, T: int, backend: str = "torch") -> int:
        """Scores of pairs, their solution and read-out; three products with the state a token."""
        size = self.chunk_size or choose_chunk_size(T)
        pairs = T // size * (size * (size + 1) // 2) + T % size * (T % size + 1) // 2
        products = pairs * 4 * (self.key_dim + self.value_dim) * self.num_heads
        return (products + 6 * T * self._memory_size()) // T
