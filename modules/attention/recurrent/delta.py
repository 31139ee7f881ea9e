"""Attention with the delta rule: what the kinds share whose state decays by head or channel."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.linalg import solve_triangular

from longhaul.kernels.common.custom_ops import without_autocast
from longhaul.kernels.delta import delta_rule, delta_rule_step, delta_summary
from longhaul.kernels.delta.cost import choose_chunk_size, delta_flops
from longhaul.kernels.delta.fla import runs_on_fla
from longhaul.modules.attention.base import (
    Attention,
    LayerShape,
    PartsConfig,
    RotaryConfig,
    overwrite,
)
from longhaul.modules.attention.parts.context_parallel import Rows, state_before
from longhaul.modules.attention.parts.gates import ScalarPerHead
from longhaul.modules.attention.parts.qkv import check_groups
from longhaul.modules.attention.power import for_each_query_head
from longhaul.modules.choices import check_bounds
from longhaul.modules.documents import Documents


@dataclass(frozen=True, kw_only=True)
class RecurrentConfig(PartsConfig):
    """Options that these kinds share."""

    speed_options: ClassVar[tuple[str, ...]] = ("chunk_size", "backend")

    key_dim: int | None = None
    """Width of a key and query, 1 or more; null: as published, from the width of a head."""

    value_dim: int | None = None
    """Width of a value, 1 or more; null: as published."""

    short_convolution: int = 4
    """Tokens that a convolution of queries, keys and values reads, with silu; 0: there is none."""

    output_norm: Literal["none", "rms"] = "rms"
    """none | rms (each head is divided by its root mean square, with one gain for all heads)."""

    output_gate: Literal["none", "silu", "sigmoid"] = "silu"
    """none | silu | sigmoid: of one more projection of x, which multiplies the output."""

    chunk_size: int | None = None
    """Tokens per chunk, a power of two; null: the cost model. Only affects speed."""

    backend: Literal["auto", "fla"] = "auto"
    """auto | fla (flash-linear-attention's, on a GPU in 16 bits). Affects speed and rounding."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self, "key_dim", "value_dim", "chunk_size", least=1)
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
    is normalised, gated, and projected. b_t = sigmoid(W x_t), or twice that with negative
    eigenvalues. A kind says what decays, g_t, in `log_gates`. One whose config is no DeltaConfig
    does not erase: S_t += k_t v_t^T, with q and k as they are.
    """

    scale: float | None = None  # None is K^(-1/2)

    def __init__(
        self, config: RecurrentConfig, shape: LayerShape, *, groups: int | None = None
    ) -> None:
        """groups: queries and keys per token, each for several heads; None: one for each head."""
        self.key_dim, self.value_dim = config.widths(shape.head_dim)
        self.erases = self.in_float32 = isinstance(config, DeltaConfig)
        qk_norm = "none" if self.erases else shape.qk_norm  # unit queries and keys need no other
        shape = replace(shape, head_dim=self.value_dim, qk_norm=qk_norm)
        super().__init__(config, shape)
        self.groups = check_groups(shape.heads if groups is None else groups, shape.heads)
        self.chunk_size = config.chunk_size
        self.backend = config.backend
        self.add_qkv(config.build_rotary if isinstance(config, RotaryConfig) else None)
        self.add_output(config)
        if isinstance(config, DeltaConfig):
            self.strongest = 2.0 if config.negative_eigenvalues else 1.0
            self.write = ScalarPerHead(shape.width, shape.heads)

    def strengths(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T H"] | None:
        """b_t; None where nothing is erased."""
        return self.strongest * self.write(x).sigmoid() if self.erases else None

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
        self.check_stateless(has_state=state is not None or keep_state)
        memory, carried = state or (None, {})
        where = Documents(x, sequence_part=self.sequence_part) if documents is None else documents
        (q, k, v), after = self._project(x, where, carried)
        beta, log_g = self.strengths(x), self.log_gates(x)
        if documents is not None:
            if log_g is None:
                log_g = x.new_zeros(v.shape[:3], dtype=torch.promote_types(x.dtype, torch.float32))
            log_g = documents.begin_anew(log_g.flatten(2)).view_as(log_g)
        mixed, memory = self._mix(q, k, v, beta, log_g, memory, keep_state)
        return self.read_out(x, mixed), None if memory is None else RecurrentState(memory, after)

    def step(
        self, x: Float[Tensor, "B 1 D"], state: RecurrentState, *, inplace: bool = False
    ) -> tuple[Float[Tensor, "B 1 D"], RecurrentState]:
        self.check_stateless(has_state=True)
        (q, k, v), after = self._project(x, Documents(x), state.carried)
        q, k = self.features(q), self.features(k)
        beta, log_g = self.strengths(x), self.log_gates(x)
        mixed, memory = delta_rule_step(
            state.memory, q, k, v, beta, log_g, scale=self.scale, inplace=inplace
        )
        return self.read_out(x, mixed), RecurrentState(memory, after)

    def step_in_place(
        self, x: Float[Tensor, "B 1 D"], state: RecurrentState
    ) -> tuple[Float[Tensor, "B 1 D"], RecurrentState]:
        y, (memory, carried) = self.step(x, state, inplace=True)
        return y, RecurrentState(memory, overwrite(state.carried, carried))

    @property
    def num_features(self) -> int:
        """Rows P of the state of a head."""
        return self.key_dim

    def features(self, x: Float[Tensor, "B T G K"]) -> Float[Tensor, "B T G P"]:
        """Queries or keys as the rows of the state have them."""
        return x

    def _mix(
        self,
        q: Float[Tensor, "B T G K"],
        k: Float[Tensor, "B T G K"],
        v: Float[Tensor, "B T H V"],
        beta: Float[Tensor, "B T H"] | None,
        log_g: Float[Tensor, "B T H *channels"] | None,
        memory: Float[Tensor, "B H P V"] | None,
        keep_state: bool,
    ) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "B H P V"] | None]:
        if self.sequence_part is not None:
            transition, added = delta_summary(k, v, beta, log_g, chunk_size=self.chunk_size)
            own = transition.flatten(0, 1), added.flatten(0, 1)
            start = (added.new_zeros(()).expand_as(own[1]),)
            (before,) = state_before(self.sequence_part, own, start, _after_part)
            memory = before.view_as(added)
        return delta_rule(
            q,
            k,
            v,
            beta,
            log_g,
            scale=self.scale,
            initial_state=memory,
            output_final_state=keep_state,
            chunk_size=self.chunk_size,
            backend=self.backend if runs_on_fla(v.device, v.dtype) else "auto",
        )

    def check_context_parallel(self) -> None:
        """The states of parts are composed."""

    def _project(
        self, x: Float[Tensor, "B T D"], documents: Documents, carried: dict[str, Tensor]
    ) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Tensor]]:
        """q, k and v in one dtype, and what the state carries besides the memory."""
        after, rotation = {}, None
        if self.rotary is not None:
            start = carried.get("rotation", x.new_zeros(len(x), dtype=torch.float64))
            rotation = documents.positions(start)
            after["rotation"] = documents.last(rotation).clone()  # not a view of all positions
        qkv, convolved = self.projected(x, documents, carried.get("convolved"))
        if convolved is not None:
            after["convolved"] = convolved
        q, k, v = self.queries_keys_values(x, rotation, documents.T, qkv=qkv)
        return (q.to(v.dtype), k.to(v.dtype), v), after

    def read_out(
        self, x: Float[Tensor, "B T D"], mixed: Float[Tensor, "B T H V"]
    ) -> Float[Tensor, "B T D"]:
        return self.project_output(x, mixed.flatten(2))

    def values(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T H V"]:
        return self.queries_keys_values(x)[2]

    def weights(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B H T T"]:
        """scores (I + system)^(-1) diag(b), both with products of gates, which may be zero."""
        (q, k, _), _ = self._project(x, Documents(x), {})
        beta, log_g = self.strengths(x), self.log_gates(x)
        exact = torch.promote_types(x.dtype, torch.float32)
        q, k = (self.features(for_each_query_head(one, self.num_heads).to(exact)) for one in (q, k))
        if log_g is None:
            log_g = q.new_zeros(q.shape[:3])
        channels = (log_g if log_g.ndim == 4 else log_g[..., None]).to(exact)
        # The products of the gates of i + 1 .. t, (B, H, T, T, K or 1).
        gates = channels.exp().transpose(1, 2)[:, :, :, None]
        later = torch.ones(gates.shape[2], gates.shape[2], dtype=torch.bool, device=x.device)
        decay = torch.where(later.tril(-1)[..., None], gates, 1).cumprod(dim=2)
        with without_autocast(x):
            scores, pairs = (
                torch.einsum("bthk,bihk,bhtik->bhti", one, k, decay)
                if log_g.ndim == 4
                else torch.einsum("bthk,bihk->bhti", one, k) * decay[..., 0]
                for one in (q, k)
            )
            scores = scores.tril() * (self.key_dim**-0.5 if self.scale is None else self.scale)
            if beta is None:
                return scores
            strength = beta.to(exact).mT  # (B, H, T)
            system = (strength[..., None] * pairs).tril(-1)
            written: Tensor = solve_triangular(
                system, torch.diag_embed(strength), upper=False, unitriangular=True
            )
            return scores @ written

    def form(self, T: int, backend: str) -> str:
        return f"chunked {self.chunk_size or choose_chunk_size(T)}"

    def mixing_flops(self, T: int, backend: str = "torch") -> int:
        chunk_size = self.chunk_size or choose_chunk_size(T)
        flops = delta_flops(T, self.key_dim, self.value_dim, chunk_size, erases=self.erases)
        return self.num_heads * flops // T

    def state_size(self) -> int:
        rotation = 0 if self.rotary is None else 1
        return self._memory_size() + self.num_convolved() + rotation

    def allocated_bytes(self, T: int, dtype: torch.dtype) -> int:
        exact = torch.promote_types(dtype, torch.float32)
        rotation = 0 if self.rotary is None else torch.float64.itemsize
        memory = self._memory_size() * exact.itemsize
        return memory + self.num_convolved() * dtype.itemsize + rotation

    def _memory_size(self) -> int:
        return self.num_heads * self.num_features * self.value_dim


def _after_part(own: Rows, state: Rows) -> Rows:
    """M S + E, from the summary M and E of a part and the state S before it."""
    transition, added = own
    with without_autocast(added):
        return (transition @ state[0] + added,)


def _unit(x: Float[Tensor, "B T H K"]) -> Float[Tensor, "B T H K"]:
    """x / |x|; zeros stay zeros."""
    return x * (x.square().sum(dim=-1, keepdim=True) + 1e-6).rsqrt()
