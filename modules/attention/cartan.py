"""Cartan kernels: rotated queries and keys, and a generator that weighs each pair of tokens."""

from dataclasses import dataclass

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import normalize

from longhaul.modules.attention.base import Attention, RotaryConfig, register
from longhaul.modules.attention.gates import ForgetGate, ForgetGateConfig, ScalarPerHead
from longhaul.modules.attention.key_softmax import key_softmax
from longhaul.modules.attention.power import GatedSum, Operands, PowerAttention, PowerConfig
from longhaul.modules.documents import Documents
from longhaul.modules.rotary import Rotary, rotate


@register("cartan")
@dataclass(frozen=True, kw_only=True)
class CartanConfig(ForgetGateConfig, RotaryConfig, PowerConfig):
    """The generator of the weights, and the form of the inner product."""

    generator: str = "full"
    """additive (softmax over key logits) | product (of forget gates) | full (both multiplied)."""

    negative_diagonal: bool = False
    """Multiply each coordinate of rotated keys by tanh(1 + W x); negative factors reflect it."""

    bilinear: bool = True
    """true: inner products of queries and keys | false: attention-free, two numbers per channel."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.generator not in ("additive", "product", "full"):
            raise ValueError(
                f"generator: found {self.generator!r}, wanted one of additive, product, full"
            )
        if self.negative_diagonal and not self.bilinear:
            raise ValueError(
                "negative_diagonal: found true with bilinear false, whose keys already are a "
                "diagonal of either sign; wanted false"
            )

    def build(self, model_dim: int, num_heads: int, layer: int = 0) -> Attention:
        variant = Cartan if self.bilinear else CartanChannels
        return variant(self, model_dim, num_heads)


class Cartan(PowerAttention):
    """y_t = sum_i g_ti (R_t q_t / |q_t|) . (D_i R_i k_i / |k_i|) v_i, then a norm per head.

        additive: g_ti = exp(s_i) / sum_(j <= t) exp(s_j)     what to attend to
        product:  g_ti = gamma_(i+1) ... gamma_t              how memories fade
        full:     the product of the two

    with s_t = W_s x_t and gamma_t = sigmoid(W_g x_t) per head, R the rotation by position, and
    D_i = diag(tanh(1 + W_d x_i)) with negative_diagonal, else 1. key_softmax.py shows how the
    additive generator becomes a gate.
    Source: the notes on Cartan decomposition.
    """

    scale = 1.0
    rotary: Rotary

    def __init__(
        self,
        config: CartanConfig,
        model_dim: int,
        num_heads: int,
        *,
        key_dim: int | None = None,
        value_dim: int | None = None,
    ) -> None:
        self.has_log_mass = config.generator != "product"
        super().__init__(config, model_dim, num_heads, key_dim=key_dim, value_dim=value_dim)
        self.logit = ScalarPerHead(model_dim, num_heads) if config.generator != "product" else None
        self.gate = None
        if config.generator != "additive":
            self.gate = ForgetGate(model_dim, num_heads, config.gate_init)
        # Weights times cosines are small, and the usual eps of 1e-5 would dominate their variance.
        self.norm = nn.GroupNorm(num_heads, model_dim, eps=1e-10)
        self.add_projections(config)

    def add_projections(self, config: CartanConfig) -> None:
        D = self.model_dim
        self.rotary = Rotary(self.head_dim, base=config.rotary_base)
        self.qkv = nn.Linear(D, 3 * D, bias=False)
        self.diagonal = nn.Linear(D, D, bias=False) if config.negative_diagonal else None

    def initial_carried(self, count: int, device: torch.device) -> dict[str, Tensor]:
        carried = super().initial_carried(count, device)
        if self.logit is not None:
            carried["log_mass"] = self.initial_log_mass(count, device)
        return carried

    def project(
        self, x: Float[Tensor, "B T D"], documents: Documents, carried: dict[str, Tensor]
    ) -> tuple[Operands, dict[str, Tensor]]:
        gated_sum, after = self.generate(x, documents, carried)
        q, k, v = rearrange(self.qkv(x), "b t (s h k) -> s b t h k", s=3, h=self.num_heads)
        cos, sin = self.rotary.phases(after["rotation"], documents.T, x.dtype)
        q, k = (rotate(normalize(one.to(cos.dtype), dim=-1), cos, sin) for one in (q, k))
        if self.diagonal is not None:
            k = k * rearrange((1 + self.diagonal(x)).tanh(), "b t (h k) -> b t h k", k=k.shape[-1])
        operands = Operands(q.to(v.dtype), k.to(v.dtype), v, (gated_sum,))
        return operands, {name: documents.last(value) for name, value in after.items()}

    def generate(
        self, x: Float[Tensor, "B T D"], documents: Documents, carried: dict[str, Tensor]
    ) -> tuple[GatedSum, dict[str, Tensor]]:
        """The gates and value scales, and the carried values at every token."""
        after = {"rotation": documents.positions(carried["rotation"])}
        log_g = None if self.gate is None else self.gate(x)
        value_scale = None
        if self.logit is not None:
            softmax = key_softmax(self.logit(x), documents, carried["log_mass"])
            log_g = softmax.log_g if log_g is None else log_g + softmax.log_g
            value_scale = softmax.alpha[..., None]
            after["log_mass"] = softmax.log_mass
        return GatedSum(log_g, value_scale), after


class CartanChannels(Cartan):
    """The attention-free form: y_t,c = sum_i g_ti (R_t q_t,c) . (R_i k_i,c) v_i,c, q_t,c in R^2.

    Every channel has its own pair of query and key coordinates and its own rotation rate. The
    generator is still one per head. The state holds two numbers per channel,
    sum_i g_ti R_i k_i v_i. The op computes it with queries and keys of width 1 that are all ones,
    and values R_i k_i v_i of width 2 V; the real queries R_t q_t scale its output. There are D
    attention matrices, one per channel.
    """

    def __init__(self, config: CartanConfig, model_dim: int, num_heads: int) -> None:
        width = 2 * model_dim // max(num_heads, 1)
        super().__init__(config, model_dim, num_heads, key_dim=1, value_dim=width)

    def add_projections(self, config: CartanConfig) -> None:
        self.rotary = Rotary(2 * self.head_dim, base=config.rotary_base)
        self.qkv = nn.Linear(self.model_dim, 5 * self.model_dim, bias=False)

    def project(
        self, x: Float[Tensor, "B T D"], documents: Documents, carried: dict[str, Tensor]
    ) -> tuple[Operands, dict[str, Tensor]]:
        gated_sum, after = self.generate(x, documents, carried)
        q, k, v = self._channels(x)
        cos, sin = self.rotary.phases(after["rotation"], documents.T, x.dtype)
        rotated_kv = rotate(k, cos, sin) * torch.cat([v, v], dim=-1)
        ones = torch.ones_like(v[..., :1])
        gated_sum = gated_sum._replace(output_scale=rotate(q, cos, sin))
        operands = Operands(ones, ones, rotated_kv, (gated_sum,))
        return operands, {name: documents.last(value) for name, value in after.items()}

    def _channels(self, x: Float[Tensor, "B T D"]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values; channel c of a head has coordinates c and c + V of q and k."""
        q, k, v = self.qkv(x).split([2 * self.model_dim, 2 * self.model_dim, self.model_dim], -1)
        q, k, v = (rearrange(one, "b t (h k) -> b t h k", h=self.num_heads) for one in (q, k, v))
        return q, k, v

    def merge(self, out: Float[Tensor, "B T H V2"], operands: Operands) -> Float[Tensor, "B T H V"]:
        first, second = super().merge(out, operands).chunk(2, dim=-1)
        return first + second

    def values(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D 1"]:
        return rearrange(self._channels(x)[2], "b t h v -> b t (h v) 1")

    def weights(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B D T T"]:
        documents = Documents(x)
        gated_sum, after = self.generate(
            x, documents, self.initial_carried(documents.count, x.device)
        )
        q, k, v = self._channels(x)
        cos, sin = self.rotary.phases(after["rotation"], documents.T, x.dtype)
        q, k = (rearrange(rotate(one, cos, sin), "b t h (s v) -> b t h v s", s=2) for one in (q, k))
        pairs = torch.einsum("bthvs,bihvs->bhvti", q, k)
        magnitude = self.coefficients(Operands(v[..., :1], v[..., :1], v, (gated_sum,)))
        return rearrange(pairs * magnitude[:, :, None], "b h v t i -> b (h v) t i")
