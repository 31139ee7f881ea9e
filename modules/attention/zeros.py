"""ZeroS: a softmax over key logits without its constant term, so that weights sum to zero."""

from abc import abstractmethod
from collections import defaultdict
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import normalize

from longhaul.modules.attention.base import Attention, LayerShape, RotaryConfig, register
from longhaul.modules.attention.parts.channels import Channels
from longhaul.modules.attention.parts.deviation_logit import DeviationLogit
from longhaul.modules.attention.parts.gates import ForgetGate, ForgetGateConfig, ScalarPerHead
from longhaul.modules.attention.parts.key_softmax import key_softmax
from longhaul.modules.attention.power import (
    GatedSum,
    OpInputs,
    PowerAttention,
    PowerConfig,
    for_each_query_head,
)
from longhaul.modules.documents import Documents


@register("zeros")
@dataclass(frozen=True, kw_only=True)
class ZerosConfig(ForgetGateConfig, RotaryConfig, PowerConfig):
    """Which source's formula is used, and which terms of the softmax's expansion have gates.

    Form notes is that of the notes on Cartan decomposition. It subtracts from a key's logit the
    mean of the logits up to that key, as the notes index it; notes_row_mean subtracts the mean of
    all logits up to the query, as published does.
    """

    form: Literal["published", "notes", "notes_row_mean"] = "published"
    """published (arXiv:2602.05230) | notes (mean of logits up to the key) | notes_row_mean."""

    zeroth: Literal["none", "first_layer"] = "none"
    """none | first_layer: the first layer keeps the mean of the values, times tanh(W_0 x)."""

    second_order: bool = False
    """Give the second-order term a gate of its own, separate from higher orders."""

    ordered: bool = False
    """Multiply subtracted terms by products of forget gates, one gate for each order."""

    bilinear: bool = True
    """true: inner products of queries and keys | false, of the notes: attention-free."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.bilinear:
            self.check_whole_rotary("with bilinear false, which is of pairs")
        if self.zeroth != "none" and self.form != "published":
            raise ValueError(
                f"zeroth: found {self.zeroth!r} with form {self.form}, which subtracts its own "
                "share of the mean in every layer; wanted none"
            )
        if not self.bilinear and self.form == "published":
            raise ValueError(
                "bilinear: found false with form published, which has no attention-free form; "
                "wanted form notes or notes_row_mean"
            )

    def build(self, shape: LayerShape) -> Attention:
        if self.form == "published":
            return PublishedZeros(self, shape)
        variant = NotesZeros if self.bilinear else NotesZerosChannels
        return variant(self, shape)


class Term(NamedTuple):
    """sign sigma_t times one order of the expansion, times products of forget gates."""

    order: int
    sigma: str  # name of a gate
    sign: int
    gate: int | None  # index in `Zeros.fading`, or None


class Zeros(PowerAttention):
    """y_t = sum_i w_ti (R_t q_t / |q_t|) . (R_i k_i / |k_i|) v_i, then a norm per head.

    w_ti is the softmax over key logits s_1 .. s_t, less terms of its expansion around equal logits.
    The softmax itself is one gated sum. A term is a polynomial in s_i whose coefficients may depend
    on t, and so a combination of gated sums with values (polynomial) v_i / t. Each of those is a
    running mean, with the gate (t - 1) / t. Terms with the same gate and polynomial share one.
    """

    scale = 1.0
    shares_scores = True
    in_float32 = True  # The gated sums almost cancel, and 16 bits would leave rounding errors only.
    logits_per_head = 1
    can_round_state = False  # The gated sums almost cancel, and rounding errors would be left.

    def __init__(self, config: ZerosConfig, shape: LayerShape) -> None:
        super().__init__(config, shape)
        # Whether the mean in terms is that of s_1 .. s_t, or of s_1 .. s_i.
        self.has_row_mean = config.form != "notes"
        self.orders = (0, 1, 2) if config.second_order else (0, 1)
        self.add_qkv(config.build_rotary)
        self.add_logit()
        self.sigma = nn.ModuleDict(
            {name: ScalarPerHead(shape.width, shape.heads) for name in self.sigma_names(config)}
        )
        self.fading = nn.ModuleList(
            ForgetGate(shape.width, shape.key_heads, config.gate_init)
            for _ in self.orders
            if config.ordered
        )
        # Outputs are sums of small weights of both signs, and the usual eps of 1e-5 would dominate
        # their variance. But both weights of the second token can be almost zero, and at an eps of
        # 1e-12 rounding errors decided the sign of its output.
        self.norm = nn.GroupNorm(shape.heads, shape.mixed_width, eps=1e-10)
        self.num_sums = 1 + len(self._means_needed())

    @abstractmethod
    def add_logit(self) -> None:
        """Make the modules behind `key_logit`."""

    @abstractmethod
    def key_logit(
        self,
        x: Float[Tensor, "B T D"],
        documents: Documents,
        carried: dict[str, Tensor],
        after: dict[str, Tensor],
    ) -> Float[Tensor, "B T G"]:
        """s_t. What later tokens need for theirs is added to `after`."""

    @abstractmethod
    def sigma_names(self, config: ZerosConfig) -> list[str]:
        """The gates sigma."""

    @abstractmethod
    def sigmas(
        self, x: Float[Tensor, "B T D"], is_later: Bool[Tensor, "B T 1"]
    ) -> tuple[Float[Tensor, "B T H"], dict[str, Tensor]]:
        """The factor of the softmax, and the gates sigma of the terms by name.

        is_later is false where a token's weight on itself may be exactly zero, because there is
        nothing before it: the norm would amplify rounding errors.
        """

    @abstractmethod
    def terms(self) -> list[Term]:
        """Everything in w_ti but the softmax."""

    def initial_carried(self, count: int, device: torch.device) -> dict[str, Tensor]:
        zeros = torch.zeros(count, self.num_key_heads, dtype=torch.float64, device=device)
        carried = super().initial_carried(count, device) | {
            "log_mass": self.initial_log_mass(count, device),
            "sum_s": zeros,
        }
        if 2 in self.orders:
            carried["sum_s2"] = zeros.clone()
        return carried

    def pivot_value_scales(self) -> tuple[float, ...]:
        # Pivot tokens take part in the softmax. The means are over real tokens only.
        return (1.0, *(0.0 for _ in self._means_needed()))

    def project(
        self, x: Float[Tensor, "B T D"], documents: Documents, carried: dict[str, Tensor]
    ) -> tuple[OpInputs, dict[str, Tensor]]:
        sums, after = self.generate(x, documents, carried)
        q, k, v = self.queries_keys_values(
            x, after["rotation"], documents.T, qkv=carried.get("qkv")
        )
        operands = OpInputs(q, k, v.to(q.dtype), sums)
        return operands, {name: documents.last(value) for name, value in after.items()}

    def before_rotation(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return normalize(q, dim=-1), normalize(k, dim=-1)

    def generate(
        self, x: Float[Tensor, "B T D"], documents: Documents, carried: dict[str, Tensor]
    ) -> tuple[tuple[GatedSum, ...], dict[str, Tensor]]:
        """The gated sums that make w_ti, and the carried values at every token."""
        after = {"rotation": documents.positions(carried["rotation"])}
        s = self.key_logit(x, documents, carried, after)
        after["sum_s"] = documents.cumsum(s.double(), carried["sum_s"])
        if 2 in self.orders:
            after["sum_s2"] = documents.cumsum(s.double().square(), carried["sum_s2"])
        softmax = key_softmax(s, documents, carried["log_mass"])
        after["log_mass"] = softmax.log_mass
        has_past = self.initial_state is not None
        factor, sigma = self.sigmas(x, (after["rotation"] > 1)[..., None] | has_past)
        whole = GatedSum(softmax.log_g, softmax.alpha[..., None], factor[..., None])
        return (whole, *self._means(x, s, sigma, after)), after

    def _means_needed(self) -> list[tuple[int | None, int]]:
        """Every gated sum but the softmax: (forget gate, number of its polynomial in s_i)."""
        found = {
            (term.gate, m): None
            for term in self.terms()
            for m in (range(term.order + 1) if self.has_row_mean else (term.order,))
        }
        return list(found)

    def _expansion(
        self, s: Float[Tensor, "B T G"], after: dict[str, Tensor]
    ) -> tuple[list[Tensor], list[dict[int, Tensor]]]:
        """Polynomials in s_i, and for each order which of them, times what, make its term.

        Terms are 1, s_i - mean and ((s_i - mean)^2 - variance) / 2, all divided by t.
        """
        count = after["rotation"][..., None]
        mean, one = (after["sum_s"] / count).to(s.dtype), torch.ones_like(s)
        if not self.has_row_mean:
            polynomials = [one, s - mean]
            if 2 in self.orders:
                variance = after["sum_s2"] / count - (after["sum_s"] / count).square()
                polynomials.append(((s - mean).square() - variance.to(s.dtype)) / 2)
            return polynomials, [{order: one} for order in self.orders]
        terms = [{0: one}, {0: -mean, 1: one}]
        if 2 in self.orders:
            square = (after["sum_s2"] / count).to(s.dtype)
            terms.append({0: mean.square() - square / 2, 1: -mean, 2: one / 2})
        return [s**m for m in self.orders], terms

    def _means(
        self,
        x: Float[Tensor, "B T D"],
        s: Float[Tensor, "B T G"],
        sigma: dict[str, Tensor],
        after: dict[str, Tensor],
    ) -> list[GatedSum]:
        """The gated sums of all terms."""
        count = after["rotation"][..., None]
        polynomials, expansion = self._expansion(s, after)
        output_scale: dict[tuple[int | None, int], Tensor] = defaultdict(
            lambda: s.new_zeros(*s.shape[:2], self.num_heads)
        )
        for term in self.terms():
            for m, coefficient in expansion[term.order].items():
                coefficient = for_each_query_head(coefficient, self.num_heads)
                size = term.sign * sigma[term.sigma] * coefficient
                output_scale[term.gate, m] = output_scale[term.gate, m] + size
        log_mean = (-1 / count).log1p().to(s.dtype).expand_as(s)
        log_g: dict[int | None, Tensor] = {None: log_mean}
        for order, forget in enumerate(self.fading):
            log_g[order] = log_mean + forget(x)
        return [
            GatedSum(
                log_g[gate],
                (polynomials[m] / count.to(s.dtype))[..., None],
                output_scale[gate, m][..., None],
            )
            for gate, m in self._means_needed()
        ]


class PublishedZeros(Zeros):
    """The published method, with options of the notes.

    With S_t the mean of the logits s_1 .. s_t, softmax_i(s) = zeroth + first + second + ...:

        zeroth = 1 / t,  first = (s_i - S_t) / t,  second = ((s_i - S_t)^2 - variance_t) / (2 t)

        w_ti = sigma^1_t first + sigma^h_t (softmax - zeroth - first)
               + sigma^2_t second - sigma^h_t second       with second_order
               + sigma^0_t zeroth                          with zeroth, in the first layer

    Each line sums to zero over i, except for zeroth. With `ordered`, the term of order n that
    sigma^h subtracts is multiplied by gamma^n_(i+1) ... gamma^n_t; the sums then are not zero.
    Sources: ZeroS, Lu et al. (2025), arXiv:2602.05230; the notes for ordered and second order.
    """

    def __init__(self, config: ZerosConfig, shape: LayerShape) -> None:
        self.keeps_mean = config.zeroth != "none" and shape.layer == 0
        super().__init__(config, shape)

    def add_logit(self) -> None:
        self.logit = DeviationLogit(self.shape)

    def initial_carried(self, count: int, device: torch.device) -> dict[str, Tensor]:
        sum_u = torch.zeros(count, self.num_key_heads, self.head_dim, device=device)
        return super().initial_carried(count, device) | {"sum_u": sum_u}

    def key_logit(
        self,
        x: Float[Tensor, "B T D"],
        documents: Documents,
        carried: dict[str, Tensor],
        after: dict[str, Tensor],
    ) -> Float[Tensor, "B T G"]:
        s: Tensor
        s, after["sum_u"] = self.logit(x, after["rotation"], documents, carried["sum_u"])
        return s

    def sigma_names(self, config: ZerosConfig) -> list[str]:
        return [*(str(order) for order in self.orders if order or self.keeps_mean), "h"]

    def sigmas(
        self, x: Float[Tensor, "B T D"], is_later: Bool[Tensor, "B T 1"]
    ) -> tuple[Float[Tensor, "B T H"], dict[str, Tensor]]:
        # sigma^0 may have either sign, as in the paper.
        sigma = {
            name: logit(x).tanh() if name == "0" else logit(x).sigmoid() * is_later
            for name, logit in self.sigma.items()
        }
        return sigma["h"], sigma

    def terms(self) -> list[Term]:
        added = [Term(int(name), name, 1, None) for name in self.sigma if name != "h"]
        return [
            *added,
            *(Term(order, "h", -1, order if len(self.fading) else None) for order in self.orders),
        ]


class NotesZeros(Zeros):
    """w_ti = softmax_i(s_1 .. s_t) - sum_n sigma^n_t term_n, for the orders n = 0, 1 (and 2).

        term_0 = 1 / t,  term_1 = (s_i - mean) / t,  term_2 = ((s_i - mean)^2 - variance) / (2 t)

    with s_i = W_s x_i and sigma^n_t = sigmoid(W_n x_t). With `ordered` (the notes' causal form),
    sigma^n_t is replaced by the product gamma^n_(i+1) ... gamma^n_t of forget gates.

    Form "notes" takes mean and variance over s_1 .. s_i, as the notes' s_i - bar s_i is written:
    term_1 is then known when token i is read. In "notes_row_mean" they are over s_1 .. s_t, as in
    the published method, so that term_1 and term_2 sum to zero over i, and a row of weights to
    1 - sigma^0_t, unless ordered.

    The notes write dots for sigma_2 and higher orders. term_2 is what the expansion of the softmax
    around equal logits has next. Orders from the third on (without second_order: from the second)
    are not subtracted; they stay in the softmax with factor 1. Nor do the notes say how s and sigma
    follow from x: s is as in their generators, and sigma, which they multiply like gates, is one.
    Source: the notes on Cartan decomposition, "ZeroS Non-causal" and "ZeroS Causal".
    """

    def add_logit(self) -> None:
        self.logit = ScalarPerHead(self.model_dim, self.num_key_heads)

    def key_logit(
        self,
        x: Float[Tensor, "B T D"],
        documents: Documents,
        carried: dict[str, Tensor],
        after: dict[str, Tensor],
    ) -> Float[Tensor, "B T G"]:
        s: Tensor = self.logit(x)
        return s

    def sigma_names(self, config: ZerosConfig) -> list[str]:
        return [] if config.ordered else [str(order) for order in self.orders]

    def sigmas(
        self, x: Float[Tensor, "B T D"], is_later: Bool[Tensor, "B T 1"]
    ) -> tuple[Float[Tensor, "B T H"], dict[str, Tensor]]:
        dtype = torch.promote_types(x.dtype, torch.float32)
        one = x.new_ones(*x.shape[:2], self.num_heads, dtype=dtype)
        if len(self.fading):
            # The softmax and term_0 of a first token are both 1, and cancel. In notes_row_mean its
            # s_1 - mean is 0 only up to the rounding of two gated sums.
            one = one * is_later
            return one, {str(order): one for order in self.orders}
        return one, {name: logit(x).sigmoid() for name, logit in self.sigma.items()}

    def terms(self) -> list[Term]:
        return [
            Term(order, str(order), -1, order if len(self.fading) else None)
            for order in self.orders
        ]


class NotesZerosChannels(Channels, NotesZeros):
    """The attention-free form, with the bracket of the notes as the weights of every channel."""

    in_float32 = True
