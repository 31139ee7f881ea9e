"""Attention through the one op: what all kinds of linear cost share."""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float, Float64, Int, Shaped
from torch import Tensor, nn

from longhaul.kernels import (
    PowerState,
    power_attention,
    power_attention_step,
    power_state,
    state_features,
    symmetric_dim,
)
from longhaul.kernels.power.cost import choose_chunk_size, choose_form, power_flops
from longhaul.kernels.shapes import DENOMINATOR_FLOOR
from longhaul.modules.attention.base import Attention, AttentionConfig
from longhaul.modules.attention.initial_state import InitialState
from longhaul.modules.attention.sequence_part import PowerSettings, mix_part
from longhaul.modules.documents import Documents


@dataclass(frozen=True, kw_only=True)
class PowerConfig(AttentionConfig):
    """Options that all kinds of linear cost share."""

    initial_state: str = "zero"
    """zero | learned: the state before a document's first token."""

    rank: int = 8
    """Rank of a learned initial state, pivot tokens a head."""

    chunk_size: int | None = None
    """Tokens a chunk of the chunked form; None lets the cost model choose. Never the result."""

    def __post_init__(self) -> None:
        if self.initial_state not in ("zero", "learned"):
            raise ValueError(
                f"initial_state: found {self.initial_state!r}, wanted one of zero, learned"
            )
        for name in ("rank", "chunk_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: found {value}, wanted 1 or more")


class Read(NamedTuple):
    """One application of the op: row_t sum_i exp(G_t - G_i) column_i (scale q_t . k_i)^p v_i."""

    log_g: Float[Tensor, "B T H"] | None = None  # no decay
    column: Float[Tensor, "B T H #V"] | None = None  # one
    row: Float[Tensor, "B T H #V"] | None = None  # one


class Operands(NamedTuple):
    """Queries, keys and values, and the reads of them whose sum is the output."""

    q: Float[Tensor, "B T H K"]
    k: Float[Tensor, "B T H K"]
    v: Float[Tensor, "B T H V"]
    reads: tuple[Read, ...] = (Read(),)


class PowerAttentionState(NamedTuple):
    """All that the past of N documents leaves behind."""

    power: PowerState
    carried: dict[str, Tensor]  # what the next gates and rotations follow from, N rows each


class PowerAttention(Attention):
    """A variant that is the op behind its own q, k, v, gates and scalings.

    A variant says in `project` what they are. Several reads share one call of the op, as heads.
    """

    degree = 1
    scale: float | None = None  # K^(-1/2)
    normalize = False
    num_reads = 1
    has_log_mass = False  # whether the reads weigh keys by a softmax, which begins with some mass
    initial_state: InitialState | None
    norm: nn.GroupNorm | None  # of the output, each head by itself

    def __init__(
        self,
        config: PowerConfig,
        model_dim: int,
        num_heads: int,
        *,
        key_dim: int | None = None,
        value_dim: int | None = None,
    ) -> None:
        """key_dim and value_dim are the widths in the op, the head's own where absent."""
        super().__init__(config, model_dim, num_heads)
        self.chunk_size = config.chunk_size
        self.key_dim = key_dim or self.head_dim
        self.value_dim = value_dim or self.head_dim
        self.out = nn.Linear(model_dim, model_dim, bias=False)
        self.norm = None
        self.initial_state = None
        if config.initial_state == "learned":
            self.initial_state = InitialState(
                num_heads, self.key_dim, self.value_dim, config.rank, has_log_mass=self.has_log_mass
            )

    @abstractmethod
    def project(
        self, x: Float[Tensor, "B T D"], documents: Documents, carried: dict[str, Tensor]
    ) -> tuple[Operands, dict[str, Tensor]]:
        """What the op takes for x, after what was carried, and what is carried on."""

    def initial_log_mass(self, count: int, device: torch.device) -> Float64[Tensor, "N H"]:
        """Log of the softmax mass of what precedes a document's first token."""
        if self.initial_state is None or self.initial_state.log_mass is None:
            return torch.full(
                (count, self.num_heads), -math.inf, dtype=torch.float64, device=device
            )
        return self.initial_state.log_mass.double().expand(count, -1)

    def initial_carried(self, count: int, device: torch.device) -> dict[str, Tensor]:
        """What `project` is given where `count` documents begin."""
        if self.rotary is None:
            return {}
        # mu, in tokens: the position, unless a variant learns how fast it turns.
        return {"rotation": torch.zeros(count, dtype=torch.float64, device=device)}

    def pivot_columns(self) -> tuple[float, ...]:
        """Factors with which a learned initial state enters each read."""
        return (1.0,) * self.num_reads

    def pivot_key(self, key: Float[Tensor, "1 R H K"]) -> Float[Tensor, "1 R H K"]:
        """Keys as the op takes them, of the learned keys of the initial state."""
        return key

    def stack(self, operands: Operands) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """q, k, v and log gates of one call of the op: reads side by side, as heads."""
        q, k, v, reads = operands
        values = [v if read.column is None else (v * read.column).to(v.dtype) for read in reads]
        if len(reads) == 1:
            return q, k, values[0], reads[0].log_g
        gated = [read.log_g for read in reads if read.log_g is not None]
        log_g = None
        if gated:
            none = torch.zeros_like(gated[0])
            log_g = torch.cat([none if r.log_g is None else r.log_g for r in reads], dim=2)
        q, k = q.repeat(1, 1, len(reads), 1), k.repeat(1, 1, len(reads), 1)
        return q, k, torch.cat(values, dim=2), log_g

    def merge(self, out: Float[Tensor, "B T RH V"], operands: Operands) -> Tensor:
        """The sum of the reads."""
        parts = out.chunk(len(operands.reads), dim=2)
        total: Tensor | None = None
        for part, read in zip(parts, operands.reads, strict=True):
            part = part if read.row is None else part * read.row
            total = part if total is None else total + part
        assert total is not None
        return total

    def read_out(
        self, x: Float[Tensor, "B T D"], mixed: Shaped[Tensor, "B T W V"]
    ) -> Float[Tensor, "B T D"]:
        y: Tensor = self.out(self.normed(rearrange(mixed, "b t w v -> b t (w v)")).to(x.dtype))
        return y

    def normed(self, y: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """Each head's output with mean 0 and variance 1, where the kind asks for that."""
        if self.norm is None:
            return y
        rows = y.flatten(0, 1).to(self.norm.weight.dtype)
        return self.norm(rows).view_as(y)  # type: ignore[no-any-return]

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        state: PowerAttentionState | None = None,
        *,
        cu_seqlens: Int[Tensor, "documents_plus_1"] | None = None,
        keep_state: bool = True,
    ) -> tuple[Float[Tensor, "B T D"], PowerAttentionState | None]:
        self._check_rates(is_whole=state is None and cu_seqlens is None and not keep_state)
        self._check_stateless(has_state=state is not None or keep_state)
        documents = Documents(x, cu_seqlens, self.parts)
        if state is None:
            power = self._initial_power(documents.count)
            carried = self.initial_carried(documents.count, x.device)
        else:
            power, carried = state
        operands, carried = self.project(x, documents, carried)
        settings = PowerSettings(self.degree, self.scale, self.normalize, self.chunk_size)
        if self.parts is not None:
            mixed, power = mix_part(documents, *self.stack(operands), power, settings), None
        else:
            mixed, power = power_attention(
                *self.stack(operands),
                **settings._asdict(),
                initial_state=power,
                output_final_state=keep_state,
                cu_seqlens=cu_seqlens,
            )
        y = self.read_out(x, self.merge(mixed, operands))
        return y, None if power is None else PowerAttentionState(power, carried)

    def step(
        self, x: Float[Tensor, "B 1 D"], state: PowerAttentionState
    ) -> tuple[Float[Tensor, "B 1 D"], PowerAttentionState]:
        self._check_rates(is_whole=False)
        self._check_stateless(has_state=True)
        operands, carried = self.project(x, Documents(x), state.carried)
        mixed, power = power_attention_step(
            state.power,
            *self.stack(operands),
            degree=self.degree,
            scale=self.scale,
            normalize=self.normalize,
        )
        y = self.read_out(x, self.merge(mixed, operands))
        return y, PowerAttentionState(power, carried)

    def operands(self, x: Float[Tensor, "B T D"]) -> Operands:
        """What `project` makes of whole documents, one a row."""
        documents = Documents(x)
        return self.project(x, documents, self.initial_carried(documents.count, x.device))[0]

    def values(self, x: Float[Tensor, "B T D"]) -> Shaped[Tensor, "B T W V"]:
        return self.operands(x).v

    def weights(self, x: Float[Tensor, "B T D"]) -> Shaped[Tensor, "B W T T"]:
        operands = self.operands(x)
        scale = self.key_dim**-0.5 if self.scale is None else self.scale
        scores = scale * torch.einsum("bthk,bihk->bhti", operands.q, operands.k)
        weights = scores**self.degree * self.coefficients(operands)
        if not self.normalize:
            return weights
        total = weights.sum(dim=-1, keepdim=True)
        return weights / torch.where(total.abs() < DENOMINATOR_FLOOR, DENOMINATOR_FLOOR, total)

    def coefficients(self, operands: Operands) -> Float[Tensor, "B H T T"]:
        """Factors of (scale q_t . k_i)^p: the sum over reads of row_t exp(G_t - G_i) column_i."""
        q = operands.q
        B, T, H, _ = q.shape
        ones = q.new_ones(B, T, H, 1, dtype=torch.promote_types(q.dtype, torch.float32))
        total = ones.new_zeros(B, H, T, T)
        for log_g, column, row in operands.reads:
            column = rearrange(ones if column is None else column, "b i h 1 -> b h 1 i")
            row = rearrange(ones if row is None else row, "b t h 1 -> b h t 1")
            total = total + row * _decay(log_g, T, ones) * column
        return total.tril()

    def form(self, T: int, backend: str) -> str:
        form, chunk_size = self._choose(T, backend)
        return form if form == "attention" else f"{form} {chunk_size}"

    def mixing_flops(self, T: int, backend: str = "torch") -> int:
        heads = self.num_reads * self.num_heads
        sizes = self.key_dim, self.value_dim, self.degree
        return heads * power_flops(T, *sizes, *self._choose(T, backend)) // T

    def state_size(self) -> int | None:
        features = symmetric_dim(self.key_dim, self.degree)
        columns = self.value_dim + self.normalize
        return self.num_reads * self.num_heads * features * columns + self._num_carried()

    def allocated_bytes(self, T: int, dtype: torch.dtype) -> int:
        features = state_features(self.key_dim, self.degree)
        power = 4 * self.num_reads * self.num_heads * features * (self.value_dim + 1)
        carried = self.initial_carried(1, torch.device("meta")).values()
        return power + sum(x.numel() * x.element_size() for x in carried)

    def _num_carried(self) -> int:
        return sum(x.numel() for x in self.initial_carried(1, torch.device("meta")).values())

    def _choose(self, T: int, backend: str) -> tuple[str, int]:
        """Form and chunk size, as the op chooses them."""
        sizes = T, self.key_dim, self.value_dim, self.degree
        chunk_size = self.chunk_size or choose_chunk_size(*sizes, backend)
        return choose_form(*sizes, backend), chunk_size

    def _initial_power(self, count: int) -> PowerState | None:
        """The learned state, once a document."""
        if self.initial_state is None:
            return None
        key, value = self.initial_state()
        key = self.pivot_key(key)
        reads = tuple(
            Read(column=torch.full_like(key[..., :1], column)) for column in self.pivot_columns()
        )
        _, k, v, _ = self.stack(Operands(key, key, value, reads))
        state = power_state(k, v, degree=self.degree)
        return PowerState(*(x.expand(count, *x.shape[1:]) for x in state))

    def check_parts(self) -> None:
        if self.degree > 4:
            raise ValueError(
                f"attention.degree: found {self.degree} of kind {self.config.kind}, whose states "
                "are too large to build; wanted 4 or less for a sequence in parts"
            )

    def _check_stateless(self, *, has_state: bool) -> None:
        if self.parts is not None and has_state:
            raise ValueError(
                "parts: found a state given or to keep, wanted neither: of a sequence in parts "
                "only training and losses are known"
            )

    def _check_rates(self, *, is_whole: bool) -> None:
        if self.rotary is not None and self.rotary.depends_on_length and not is_whole:
            raise ValueError(
                f"positions: found dynamic_ntk for a state of kind {self.config.kind}, whose keys "
                "cannot be rotated again as the sequence grows; wanted linear or none, or whole "
                "windows without a state"
            )


def _decay(log_g: Tensor | None, T: int, like: Tensor) -> Float[Tensor, "*B_H T T"]:
    """exp(G_t - G_i) for i <= t: products of gates, so that a gate of zero is a zero, not a NaN."""
    if log_g is None:
        return like.new_ones(T, T)
    gates = rearrange(log_g.to(like.dtype).exp(), "b t h -> b h t 1")
    is_later = torch.ones(T, T, dtype=torch.bool, device=log_g.device).tril(-1)
    return torch.where(is_later, gates, torch.ones_like(gates)).cumprod(dim=-2)
