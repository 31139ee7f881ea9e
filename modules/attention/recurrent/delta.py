"""Attention with the delta rule: what the kinds share whose state decays by head or channel."""

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.linalg import solve_triangular

from longhaul.kernels import delta_rule, delta_rule_step
from longhaul.kernels.common.custom_ops import without_autocast
from longhaul.kernels.delta.cost import choose_chunk_size, delta_flops
from longhaul.modules.attention.base import Attention, AttentionConfig, LayerShape, overwrite
from longhaul.modules.attention.parts.output_norm import OutputNorm
from longhaul.modules.attention.parts.short_convolution import check_short_convolution
from longhaul.modules.attention.power import for_each_query_head
from longhaul.modules.choices import check_bounds
from longhaul.modules.documents import Documents


@dataclass(frozen=True, kw_only=True)
class RecurrentConfig(AttentionConfig):
    """Options that these kinds share."""

    speed_options: ClassVar[tuple[str, ...]] = ("chunk_size",)

    key_dim: int | None = None
    """Width of a key and query, 1 or more; null: as published, from the width of a head."""

    value_dim: int | None = None
    """Width of a value, 1 or more; null: as published."""

    short_convolution: int = 4
    """Tokens that a convolution of queries, keys and values reads, with silu; 0: there is none."""

    output_gate: Literal["none", "silu", "sigmoid"] = "silu"
    """none | silu | sigmoid: of a projection of x; it multiplies the normalised output."""

    chunk_size: int | None = None
    """Tokens per chunk, a power of two; null: the cost model. Only affects speed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self, "key_dim", "value_dim", "chunk_size", least=1)
        check_short_convolution(self.short_convolution)
        if self.chunk_size is not None and self.chunk_size & (self.chunk_size - 1):
            raise ValueError(f"chunk_size: found {self.chunk_size}, wanted a power of two")

    def widths(self, head_dim: int) -> tuple[int, int]:
        """Widths of keys and values in a model with heads of this width."""
        K = head_dim if self.key_dim is None else self.key_dim
        return K, head_dim if self.value_dim is None else self.value_dim


@dataclass(frozen=True, kw_only=True)
class DeltaConfig(RecurrentConfig):
    """Options of the kinds that erase."""

    negative_eigenvalues: bool = False
    """Write strengths up to 2 in place of 1, with which a token may turn what it erases around."""


class RecurrentState(NamedTuple):
    """The state of B documents."""

    memory: Float[Tensor, "B H K V"]
    carried: dict[str, Tensor]  # "convolved": the last inputs of the short convolution


class DeltaAttention(Attention):
    """S_t = Diag(e^g_t) S_(t-1), S_t += b_t k_t (v_t - S_t^T k_t)^T, y_t = S_t^T q_t / sqrt(K).

    q, k and v are silu of a short convolution of projections, |q_t| and |k_t| are 1. Then each head
    is normalised, gated, and projected. A kind says how strongly its tokens write, b_t, and what
    decays, g_t. One that does not erase has S_t += k_t v_t^T, with q and k as they are.
    """

    erases = True

    def __init__(
        self, config: RecurrentConfig, shape: LayerShape, *, groups: int | None = None
    ) -> None:
        """groups: queries and keys per token, each for several heads; None: one for each head."""
        self.key_dim, self.value_dim = config.widths(shape.head_dim)
        self.in_float32 = self.erases
        shape = replace(shape, head_dim=self.value_dim)
        super().__init__(config, shape)
        self.groups = check_groups(shape.heads if groups is None else groups, shape.heads)
        self.chunk_size = config.chunk_size
        self.short_convolution = config.short_convolution
        self.add_qkv()
        self.gate: nn.Module | None = None
        activation: Literal["silu", "sigmoid"] = "silu"
        if config.output_gate != "none":
            activation = config.output_gate
            self.gate = self.build_gate(shape)
        self.output_norm = OutputNorm(self.value_dim, activation=activation)
        self.out = shape.out_projection()

    @abstractmethod
    def write_and_decay(
        self, x: Float[Tensor, "B T D"]
    ) -> tuple[Float[Tensor, "B T H"] | None, Float[Tensor, "B T H *channels"] | None]:
        """b_t, and g_t of every head or of every channel of its keys; None: as the class says."""

    def build_gate(self, shape: LayerShape) -> nn.Module:
        """What the output gate is the activation of."""
        return shape.projection(shape.mixed_width)

    def head_shapes(self) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        keys = self.groups, self.key_dim
        return keys, keys, (self.num_heads, self.value_dim)

    def before_rotation(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return (_unit(q), _unit(k)) if self.erases else (q, k)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        state: RecurrentState | None = None,
        *,
        documents: Documents | None = None,
        keep_state: bool = True,
    ) -> tuple[Float[Tensor, "B T D"], RecurrentState | None]:
        if state is not None and keep_state and x.shape[1] == 1 and not torch.is_grad_enabled():
            return self.step(x, state)
        memory, carried = state or (None, {})
        (q, k, v), after = self._project(x, documents or Documents(x), carried)
        beta, log_g = self.write_and_decay(x)
        if documents is not None:
            log_g = _begin_anew(documents, x.new_zeros(v.shape[:3]) if log_g is None else log_g)
        mixed, memory = delta_rule(
            q,
            k,
            v,
            beta,
            log_g,
            initial_state=memory,
            output_final_state=keep_state,
            chunk_size=self.chunk_size,
        )
        return self.read_out(x, mixed), None if memory is None else RecurrentState(memory, after)

    def step(
        self, x: Float[Tensor, "B 1 D"], state: RecurrentState, *, inplace: bool = False
    ) -> tuple[Float[Tensor, "B 1 D"], RecurrentState]:
        operands, after = self._project(x, Documents(x), state.carried)
        mixed, memory = delta_rule_step(
            state.memory, *operands, *self.write_and_decay(x), inplace=inplace
        )
        return self.read_out(x, mixed), RecurrentState(memory, after)

    def step_in_place(
        self, x: Float[Tensor, "B 1 D"], state: RecurrentState
    ) -> tuple[Float[Tensor, "B 1 D"], RecurrentState]:
        y, (memory, carried) = self.step(x, state, inplace=True)
        return y, RecurrentState(memory, overwrite(state.carried, carried))

    def _project(
        self, x: Float[Tensor, "B T D"], documents: Documents, carried: dict[str, Tensor]
    ) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Tensor]]:
        """q, k and v in one dtype, and what the state carries besides the memory."""
        qkv, convolved = self.projected(x, documents, carried.get("convolved"))
        q, k, v = self.queries_keys_values(x, qkv=qkv)
        return (q.to(v.dtype), k.to(v.dtype), v), {} if convolved is None else {
            "convolved": convolved
        }

    def read_out(
        self, x: Float[Tensor, "B T D"], mixed: Float[Tensor, "B T H V"]
    ) -> Float[Tensor, "B T D"]:
        gate = None if self.gate is None else self.gate(x)
        y: Tensor = self.out(self.output_norm(mixed.flatten(2), gate).to(x.dtype))
        return y

    def log_gates(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T H *parts"] | None:
        return self.write_and_decay(x)[1]

    def values(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T H V"]:
        return self.queries_keys_values(x)[2]

    def weights(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B H T T"]:
        """scores (I + system)^(-1) diag(b), both with products of gates, which may be zero."""
        q, k, _ = self.queries_keys_values(x)
        beta, log_g = self.write_and_decay(x)
        exact = torch.promote_types(x.dtype, torch.float32)
        q, k = (for_each_query_head(one, self.num_heads).to(exact) for one in (q, k))
        T = x.shape[1]
        with without_autocast(x):
            if log_g is None:
                scores, pairs = (torch.einsum("bthk,bihk->bhti", one, k) for one in (q, k))
            else:
                channels = log_g if log_g.ndim == 4 else log_g[..., None]
                gates = (
                    channels.to(exact).exp().permute(0, 2, 1, 3)[:, :, :, None]
                )  # (B, H, T, 1, K)
                later = torch.ones(T, T, dtype=torch.bool, device=x.device).tril(-1)[..., None]
                decay = torch.where(later, gates, 1).cumprod(dim=2)
                decay = decay.expand(*decay.shape[:-1], q.shape[-1])
                scores, pairs = (
                    torch.einsum("bthk,bihk,bhtik->bhti", one, k, decay) for one in (q, k)
                )
            scores = scores.tril() * self.key_dim**-0.5
            if beta is None:
                return scores
            strength = beta.to(exact).mT  # (B, H, T)
            system = (strength[..., None] * pairs).tril(-1)
            return scores @ solve_triangular(
                system, torch.diag_embed(strength), upper=False, unitriangular=True
            )

    def form(self, T: int, backend: str) -> str:
        return f"chunked {self.chunk_size or choose_chunk_size(T)}"

    def mixing_flops(self, T: int, backend: str = "torch") -> int:
        chunk_size = self.chunk_size or choose_chunk_size(T)
        flops = delta_flops(T, self.key_dim, self.value_dim, chunk_size, erases=self.erases)
        return self.num_heads * flops // T

    def state_size(self) -> int:
        return self.num_heads * self.key_dim * self.value_dim + self._num_convolved()

    def allocated_bytes(self, T: int, dtype: torch.dtype) -> int:
        memory = self.num_heads * self.key_dim * self.value_dim
        exact = torch.promote_types(dtype, torch.float32)
        return memory * exact.itemsize + self._num_convolved() * dtype.itemsize

    def _num_convolved(self) -> int:
        return 0 if self.convolution is None else self.convolution.state_size


def check_groups(groups: int, heads: int) -> int:
    """So many queries and keys, if heads can share them equally; else ValueError."""
    if heads % groups:
        raise ValueError(f"attention.groups: found {groups}, wanted a divisor of {heads} heads")
    return groups


def _unit(x: Float[Tensor, "B T H K"]) -> Float[Tensor, "B T H K"]:
    """x / |x|; zeros stay zeros."""
    return x * (x.square().sum(dim=-1, keepdim=True) + 1e-6).rsqrt()


def _begin_anew(
    documents: Documents, log_g: Float[Tensor, "B T H *channels"]
) -> Float[Tensor, "B T H *channels"]:
    return documents.begin_anew(log_g.flatten(2)).view_as(log_g)
