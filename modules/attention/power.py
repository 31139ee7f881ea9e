"""Attention with `power_attention`: what all variants of linear cost share."""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64, Shaped
from torch import Tensor, nn

from longhaul.kernels import (
    PowerState,
    power_attention,
    power_attention_step,
    power_state,
    state_features,
    symmetric_dim,
)
from longhaul.kernels.common.custom_ops import without_autocast
from longhaul.kernels.power.cost import choose_chunk_size, choose_form, power_flops
from longhaul.kernels.power.torch.gated_sums import add_gated_sums, serves_sums
from longhaul.kernels.shapes import DENOMINATOR_FLOOR, HIGHEST_UNSCALED_DEGREE
from longhaul.modules.attention.base import (
    Attention,
    LayerShape,
    PartsConfig,
    overwrite,
)
from longhaul.modules.attention.parts.context_parallel import (
    PowerOptions,
    context_parallel_attention,
)
from longhaul.modules.attention.parts.initial_state import InitialState
from longhaul.modules.choices import check_bounds
from longhaul.modules.documents import Documents


@dataclass(frozen=True, kw_only=True)
class PowerConfig(PartsConfig):
    """Options that all variants of linear cost share."""

    speed_options: ClassVar[tuple[str, ...]] = ("chunk_size",)

    initial_state: Literal["zero", "learned"] = "zero"
    """zero | learned: the state before the first token of a document."""

    rank: int = 8
    """Rank of a learned initial state: its number of pivot tokens per head, 1 or more."""

    chunk_size: int | None = None
    """Tokens per chunk of the chunked form, 1 or more; null: the cost model. Only affects speed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self, "rank", "chunk_size", least=1)


class GatedSum(NamedTuple):
    """output_scale_t sum_i exp(G_t - G_i) (scale q_t . k_i)^p value_scale_i v_i.

    G is the running sum of log_g. None means no decay, and scales of 1.
    """

    log_g: Float[Tensor, "B T G *parts"] | None = None  # parts: see vector_gates.py
    value_scale: Float[Tensor, "B T G #V"] | None = None
    output_scale: Float[Tensor, "B T H #V"] | None = None


class OpInputs(NamedTuple):
    """Queries, keys and values, and the gated sums over them that add up to the output."""

    q: Float[Tensor, "B T H K"]
    k: Float[Tensor, "B T G K"]
    v: Float[Tensor, "B T G V"]
    sums: tuple[GatedSum, ...] = (GatedSum(),)


class PowerAttentionState(NamedTuple):
    """The state of N documents: everything that later tokens need of earlier ones."""

    power: PowerState
    carried: dict[str, Tensor]  # running values behind gates and rotations, with N rows each


class PowerAttention(Attention):
    """A variant that computes its output with `power_attention`.

    A variant defines its queries, keys, values, gates and scales in `project`. Where its output is
    the sum of several gated sums, they are computed in one call, stacked along the head axis.
    """

    degree = 1
    scale: float | None = None  # None is K^(-1/2)
    normalize = False
    can_round_state = True
    groups_keys = True
    num_sums = 1
    # Whether gated sums differ by a gate and two scales a head alone, and are not normalised.
    shares_scores = False
    norm_groups: int | None = None  # of the output norm, if not one a head
    logits_per_head = 0  # softmaxes over key logits, which weigh the values
    initial_state: InitialState | None
    norm: nn.GroupNorm | None  # normalises the output of each head

    def __init__(self, config: PowerConfig, shape: LayerShape) -> None:
        super().__init__(config, shape)
        self.chunk_size = config.chunk_size
        self.key_dim, self.value_dim = self.op_widths()
        self.add_output(config, groups=self.norm_groups)
        self.norm = None
        self.initial_state = None
        if config.initial_state == "learned":
            self.initial_state = InitialState(
                shape.key_heads,
                self.key_dim,
                self.value_dim,
                config.rank,
                num_log_masses=shape.key_heads * self.logits_per_head,
            )

    @abstractmethod
    def project(
        self, x: Float[Tensor, "B T D"], documents: Documents, carried: dict[str, Tensor]
    ) -> tuple[OpInputs, dict[str, Tensor]]:
        """The arguments of the op for x, and the new carried values.

        `carried` holds the values after the previous token of each document, and as `qkv` what
        `queries_keys_values` takes by that name in a layer with a short convolution.
        """

    def op_widths(self) -> tuple[int, int]:
        """Widths of the keys and of the values that are given to the op."""
        return self.head_dim, self.head_dim

    @property
    def op_heads(self) -> int:
        """Query heads of the call of the op."""
        return self.num_sums * self.num_heads

    @property
    def num_states(self) -> int:
        """Key heads of the call of the op, each of which has a state."""
        return self.op_heads * self.num_key_heads // self.num_heads

    def initial_log_mass(self, count: int, device: torch.device) -> Float64[Tensor, "N S"]:
        """Log-sum-exp of the key logits before the first token of each of `count` documents."""
        *_, log_mass = (None,) if self.initial_state is None else self.initial_state()
        if log_mass is None:
            logits = self.num_key_heads * self.logits_per_head
            return torch.full((count, logits), -math.inf, dtype=torch.float64, device=device)
        return log_mass.double().expand(count, -1)  # type: ignore[no-any-return]

    def initial_carried(self, count: int, device: torch.device) -> dict[str, Tensor]:
        """The carried values at the beginning of `count` documents."""
        if self.rotary is None:
            return {}
        # mu, in tokens: it equals the position, unless the variant learns its rotation rate.
        return {"rotation": torch.zeros(count, dtype=torch.float64, device=device)}

    def pivot_value_scales(self) -> tuple[float, ...]:
        """The value scale of the pivot tokens of a learned initial state in each gated sum."""
        return (1.0,) * self.num_sums

    def pivot_key(self, key: Float[Tensor, "1 R H K"]) -> Float[Tensor, "1 R H K"]:
        """The keys given to the op for the learned keys of the initial state."""
        return key

    def stack(self, operands: OpInputs) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """q, k, v and log gates of one call of the op, gated sums stacked along the head axis."""
        q, k, v, sums = operands
        values = [
            v if one.value_scale is None else (v * one.value_scale).to(v.dtype) for one in sums
        ]
        if len(sums) == 1:
            return q, k, values[0], sums[0].log_g
        gated = [one.log_g for one in sums if one.log_g is not None]
        log_g = None
        if gated:
            no_decay = torch.zeros_like(gated[0])
            log_g = torch.cat([no_decay if s.log_g is None else s.log_g for s in sums], dim=2)
        q, k = q.repeat(1, 1, len(sums), 1), k.repeat(1, 1, len(sums), 1)
        return q, k, torch.cat(values, dim=2), log_g

    def merge(self, out: Float[Tensor, "B T SH V"], operands: OpInputs) -> Tensor:
        """Scale the gated sums in the output of the op, and add them up."""
        total: Tensor | None = None
        for part, one in zip(out.chunk(len(operands.sums), dim=2), operands.sums, strict=True):
            scaled = part if one.output_scale is None else part * one.output_scale
            total = scaled if total is None else total + scaled
        assert total is not None
        return total

    def read_out(
        self, x: Float[Tensor, "B T D"], mixed: Shaped[Tensor, "B T W V"]
    ) -> Float[Tensor, "B T D"]:
        return self.project_output(x, self.normed(mixed.flatten(2)).to(x.dtype))

    def normed(self, y: Float[Tensor, "B T HV"]) -> Float[Tensor, "B T HV"]:
        """The output with mean 0 and variance 1 in each head, where the variant has a norm."""
        if self.norm is None:
            return y
        rows = y.flatten(0, 1).to(self.norm.weight.dtype)
        return self.norm(rows).view_as(y)  # type: ignore[no-any-return]

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        state: PowerAttentionState | None = None,
        *,
        documents: Documents | None = None,
        keep_state: bool = True,
    ) -> tuple[Float[Tensor, "B T D"], PowerAttentionState | None]:
        if state is not None and keep_state and x.shape[1] == 1 and not torch.is_grad_enabled():
            return self.step(x, state)
        self._check_scaling(is_whole=state is None and documents is None and not keep_state)
        self.check_stateless(has_state=state is not None or keep_state)
        power, carried = state or (None, self.initial_carried(len(x), x.device))
        where = Documents(x, sequence_part=self.sequence_part) if documents is None else documents
        operands, carried = self._project(x, where, carried)
        if state is None and not keep_state and self.shares_scores:
            whole = self._add_sums(where, operands)
            if whole is not None:
                return self.read_out(x, whole), None
        stacked = self.stack(operands)
        if documents is not None:
            mixed, power = self._mix_documents(documents, *stacked), None
        else:
            start = self._initial_power(len(x)) if state is None else power
            mixed, power = self._mix(*stacked, start=start, keep_state=keep_state)
        y = self.read_out(x, self.merge(mixed, operands))
        return y, None if power is None else PowerAttentionState(power, carried)

    def _add_sums(
        self, documents: Documents, operands: OpInputs
    ) -> Float[Tensor, "B T H V"] | None:
        """The scaled output of the op, added up, in a call that scores each pair of tokens once.

        None where there is no such call: with a state, on a GPU, or where it costs more.
        """
        if self.initial_state is not None or self.sequence_part is not None:
            return None
        q, k, v, sums = operands
        log_g, value_scale, output_scale = (
            [x for x in each if x is not None] for each in zip(*sums, strict=True)
        )
        if not len(log_g) == len(value_scale) == len(output_scale) == len(sums):
            return None
        options = {"num_sums": len(sums), "degree": self.degree}
        if not serves_sums(q, k, v, *value_scale, *output_scale, **options):
            return None
        return add_gated_sums(
            *(q, k, v),
            torch.stack([documents.begin_anew(one) for one in log_g], dim=-1),
            torch.cat(value_scale, dim=-1),
            torch.cat(output_scale, dim=-1),
            degree=self.degree,
            scale=self.key_dim**-0.5 if self.scale is None else self.scale,
        )

    def _mix(
        self,
        q: Float[Tensor, "B T NH K"],
        k: Float[Tensor, "B T NG K"],
        v: Float[Tensor, "B T NG V"],
        log_g: Float[Tensor, "B T NG"] | None,
        *,
        start: PowerState | None = None,
        keep_state: bool = False,
        normalize: bool | None = None,
    ) -> tuple[Float[Tensor, "B T NH V"], PowerState | None]:
        """The op, over the whole sequence also where this rank has one part of it."""
        normalize = self.normalize if normalize is None else normalize
        options = PowerOptions(self.degree, self.scale, normalize, self.chunk_size)
        if self.sequence_part is not None:
            part = self.sequence_part
            return context_parallel_attention(part, q, k, v, log_g, start, options), None
        return power_attention(
            q, k, v, log_g, **options._asdict(), initial_state=start, output_final_state=keep_state
        )

    def _mix_documents(
        self,
        documents: Documents,
        q: Float[Tensor, "B T NH K"],
        k: Float[Tensor, "B T NG K"],
        v: Float[Tensor, "B T NG V"],
        log_g: Float[Tensor, "B T NG"] | None,
    ) -> Float[Tensor, "B T NH V"]:
        """The op, where a document begins with a gate of zero.

        Such a gate would also forget a learned initial state. So the pivot tokens, which stand
        before every document, are added to the sums over its own tokens. The sum of the weights,
        if any, is one more value.
        """
        dtype = torch.promote_types(q.dtype, torch.float32)
        no_decay = k.new_zeros(k.shape[:3], dtype=dtype)
        reset = documents.begin_anew(no_decay if log_g is None else log_g)
        if self.initial_state is None:
            return self._mix(q, k, v, reset)[0]
        pivot_k, pivot_v = (for_each_query_head(one, q.shape[2]) for one in self._pivots())
        q, k, v, pivot_k, pivot_v = (one.to(dtype) for one in (q, k, v, pivot_k, pivot_v))
        if self.normalize:
            v, pivot_v = (F.pad(one, (0, 1), value=1.0) for one in (v, pivot_v))
        scale = self.key_dim**-0.5 if self.scale is None else self.scale
        with without_autocast(q):
            weights = (scale * torch.einsum("bthk,zrhk->bthr", q, pivot_k)) ** self.degree
            if log_g is not None:
                none = log_g.new_zeros(len(log_g), log_g.shape[2], dtype=torch.float64)
                decay = documents.cumsum(log_g.double(), none).exp().to(dtype)
                weights = weights * for_each_query_head(decay, q.shape[2])[..., None]
            pivots = torch.einsum("bthr,zrhv->bthv", weights, pivot_v)
        sums = self._mix(q, k, v, reset, normalize=False)[0] + pivots
        return _divided(sums[..., :-1], sums[..., -1:]) if self.normalize else sums

    def step_in_place(
        self, x: Float[Tensor, "B 1 D"], state: PowerAttentionState
    ) -> tuple[Float[Tensor, "B 1 D"], PowerAttentionState]:
        y, (power, carried) = self.step(x, state, inplace=True)
        return y, PowerAttentionState(power, overwrite(state.carried, carried))

    def step(
        self, x: Float[Tensor, "B 1 D"], state: PowerAttentionState, *, inplace: bool = False
    ) -> tuple[Float[Tensor, "B 1 D"], PowerAttentionState]:
        self._check_scaling(is_whole=False)
        self.check_stateless(has_state=True)
        operands, carried = self._project(x, Documents(x), state.carried)
        mixed, power = power_attention_step(
            state.power,
            *self.stack(operands),
            degree=self.degree,
            scale=self.scale,
            normalize=self.normalize,
            inplace=inplace,
        )
        y = self.read_out(x, self.merge(mixed, operands))
        return y, PowerAttentionState(power, carried)

    def operands(self, x: Float[Tensor, "B T D"]) -> OpInputs:
        """The arguments of the op for whole documents, one per row."""
        documents = Documents(x)
        return self._project(x, documents, self.initial_carried(len(x), x.device))[0]

    def _project(
        self, x: Float[Tensor, "B T D"], documents: Documents, carried: dict[str, Tensor]
    ) -> tuple[OpInputs, dict[str, Tensor]]:
        """`project`, and before it the short convolution, if there is one."""
        if self.convolution is None:
            return self.project(x, documents, carried)
        qkv, convolved = self.projected(x, documents, carried.get("convolved"))
        operands, after = self.project(x, documents, {**carried, "qkv": qkv})
        assert convolved is not None
        return operands, {**after, "convolved": convolved}

    def of_query_heads(self, operands: OpInputs) -> OpInputs:
        """The same with the keys, values and gates of each query head's key head for itself."""
        q, k, v, sums = operands

        def repeated(x: Tensor | None) -> Tensor | None:
            return None if x is None else for_each_query_head(x, self.num_heads)

        own = tuple(GatedSum(repeated(g), repeated(by), scale) for g, by, scale in sums)
        k, v = (for_each_query_head(one, self.num_heads) for one in (k, v))
        return OpInputs(q, k, v, own)

    def log_gates(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T H *parts"] | None:
        """Those of the first gated sum that has any."""
        sums = self.of_query_heads(self.operands(x)).sums
        return next((one.log_g for one in sums if one.log_g is not None), None)

    def values(self, x: Float[Tensor, "B T D"]) -> Shaped[Tensor, "B T W V"]:
        return self.of_query_heads(self.operands(x)).v

    def weights(self, x: Float[Tensor, "B T D"]) -> Shaped[Tensor, "B W T T"]:
        operands = self.of_query_heads(self.operands(x))
        scale = self.key_dim**-0.5 if self.scale is None else self.scale
        scores = scale * torch.einsum("bthk,bihk->bhti", operands.q, operands.k)
        coefficients = self.coefficients(operands)
        if self.normalize and self.degree > HIGHEST_UNSCALED_DEGREE:
            # As in the op: the unit of a row cancels, and its power could be infinite or 0.
            scores = torch.where(coefficients > 0, scores, 0)
            largest = (scores.detach().abs() * coefficients.detach() ** (1 / self.degree)).amax(
                dim=-1, keepdim=True
            )
            scores = scores / torch.where(largest == 0, 1, largest)
        weights = scores**self.degree * coefficients
        if not self.normalize:
            return weights
        return _divided(weights, weights.sum(dim=-1, keepdim=True))

    def coefficients(self, operands: OpInputs) -> Float[Tensor, "B H T T"]:
        """The factors of (scale q_t . k_i)^p, summed over all gated sums, of query heads.

        Each gated sum adds output_scale_t exp(G_t - G_i) value_scale_i.
        """
        q = operands.q
        B, T, H, _ = q.shape
        ones = q.new_ones(B, T, H, 1, dtype=torch.promote_types(q.dtype, torch.float32))
        total = ones.new_zeros(B, H, T, T)
        for log_g, value_scale, output_scale in operands.sums:
            column = (ones if value_scale is None else value_scale).permute(
                0, 2, 3, 1
            )  # (B, H, 1, T)
            row = (ones if output_scale is None else output_scale).transpose(1, 2)  # (B, H, T, 1)
            total = total + row * _decay(log_g, T, ones) * column
        return total.tril()

    def form(self, T: int, backend: str) -> str:
        form, chunk_size = self._choose(T, backend)
        return form if form == "attention" else f"{form} {chunk_size}"

    def passes_on_state(self, T: int, backend: str) -> bool:
        return self._choose(T, backend)[0] == "chunked"

    def mixing_flops(self, T: int, backend: str = "torch") -> int:
        sizes = self.key_dim, self.value_dim, self.degree
        queries = self.num_heads // self.num_key_heads
        flops = power_flops(T, *sizes, *self._choose(T, backend), queries=queries)
        return self.num_states * flops // T

    def state_size(self) -> int | None:
        features = symmetric_dim(self.key_dim, self.degree)
        columns = self.value_dim + self.normalize
        return self.num_states * features * columns + self._num_carried() + self.num_convolved()

    def allocated_bytes(self, T: int, dtype: torch.dtype) -> int:
        features = state_features(self.key_dim, self.degree)
        power = 4 * self.num_states * features * (self.value_dim + 1)
        carried = self.initial_carried(1, torch.device("meta")).values()
        power += sum(x.numel() * x.element_size() for x in carried)
        return power + self.num_convolved() * dtype.itemsize

    def _num_carried(self) -> int:
        return sum(x.numel() for x in self.initial_carried(1, torch.device("meta")).values())

    def _choose(self, T: int, backend: str) -> tuple[str, int]:
        """The form and the chunk size that the op chooses."""
        sizes = T, self.key_dim, self.value_dim, self.degree
        chunk_size = self.chunk_size or choose_chunk_size(*sizes, backend)
        return choose_form(*sizes, backend), chunk_size

    def _initial_power(self, count: int) -> PowerState | None:
        """The learned initial state, repeated for each of `count` documents."""
        if self.initial_state is None:
            return None
        state = power_state(*self._pivots(), degree=self.degree)
        return PowerState(*(x.expand(count, *x.shape[1:]) for x in state))

    def _pivots(self) -> tuple[Float[Tensor, "1 R NH K"], Float[Tensor, "1 R NH V"]]:
        """Keys and values of the learned initial state, as they are given to the op."""
        assert self.initial_state is not None
        key, value, _ = self.initial_state()
        key = self.pivot_key(key)
        sums = tuple(
            GatedSum(value_scale=torch.full_like(key[..., :1], scale))
            for scale in self.pivot_value_scales()
        )
        _, k, v, _ = self.stack(OpInputs(key, key, value, sums))
        return k, v

    def check_context_parallel(self) -> None:
        if self.degree > 4:
            raise ValueError(
                f"attention.degree: found {self.degree} with kind {self.config.kind}, whose states "
                "are too large to build; wanted 4 or less for context parallelism"
            )

    def _check_scaling(self, *, is_whole: bool) -> None:
        if self.rotary is not None and self.rotary.depends_on_length and not is_whole:
            raise ValueError(
                f"positions: found {self.rotary.length_scaling} for a state of kind "
                f"{self.config.kind}, which does not hold the keys that a longer sequence would "
                "rotate anew; wanted linear or none, or whole windows without a state"
            )


def for_each_query_head(x: Shaped[Tensor, "B T G *rest"], heads: int) -> Tensor:
    """What each of `heads` query heads has of its key head: (B, T, heads, ...)."""
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], dim=2)


def _divided(sums: Tensor, total: Tensor) -> Tensor:
    """Sums over the total of their weights, as in the op."""
    return sums / torch.where(total.abs() < DENOMINATOR_FLOOR, DENOMINATOR_FLOOR, total)


def _decay(log_g: Tensor | None, T: int, like: Tensor) -> Float[Tensor, "*B_H T T"]:
    """exp(G_t - G_i) for i <= t, as products of gates: a gate of 0 then gives 0 and not NaN."""
    if log_g is None:
        return like.new_ones(T, T)
    gates = log_g.to(like.dtype).exp().mT[..., None]  # (B, H, T, 1)
    is_later = torch.ones(T, T, dtype=torch.bool, device=log_g.device).tril(-1)
    return torch.where(is_later, gates, torch.ones_like(gates)).cumprod(dim=-2)
