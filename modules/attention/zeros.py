"""ZeroS: a softmax over key logits without its constant term, so that weights sum to zero."""

from collections import defaultdict
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


@register("zeros")
@dataclass(frozen=True, kw_only=True)
class ZerosConfig(ForgetGateConfig, RotaryConfig, PowerConfig):
    """Which terms of the softmax's expansion get gates of their own."""

    zeroth: str = "none"
    """none | first_layer: the first layer keeps the mean of the values, times tanh(W_0 x)."""

    second_order: bool = False
    """Give the second-order term a gate of its own, separate from higher orders."""

    ordered: bool = False
    """Multiply subtracted terms by products of forget gates, one gate for each order."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.zeroth not in ("none", "first_layer"):
            raise ValueError(f"zeroth: found {self.zeroth!r}, wanted none or first_layer")

    def build(self, model_dim: int, num_heads: int, layer: int = 0) -> Attention:
        return Zeros(self, model_dim, num_heads, keeps_mean=self.zeroth != "none" and layer == 0)


class DeviationLogit(nn.Module):
    """s_i = -u_i . m_i / sqrt(K): how far u_i = W_u x_i points away from its running mean m_i.

    m_i = (e^tau mu + u_1 + ... + u_i) / (e^tau + i), with a learned prior mu of weight e^tau.
    """

    def __init__(self, model_dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.project = nn.Linear(model_dim, model_dim, bias=False)
        self.mu = nn.Parameter(torch.empty(num_heads, model_dim // num_heads))
        self.tau = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.mu)
        nn.init.zeros_(self.tau)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        count: Float[Tensor, "B T"],
        documents: Documents,
        sum_u: Float[Tensor, "N H K"],
    ) -> tuple[Float[Tensor, "B T H"], Float[Tensor, "B T H K"]]:
        """Logits, and the sums of u up to every token, in at least float32."""
        u = rearrange(self.project(x), "b t (h k) -> b t h k", h=self.num_heads)
        u = u.to(torch.promote_types(u.dtype, torch.float32))
        total = documents.cumsum(u, sum_u).to(u.dtype)
        count = count[..., None, None].to(u.dtype)
        prior = (self.tau.to(u.dtype)[:, None] - count.log()).sigmoid()  # e^tau / (e^tau + i)
        mean = prior * self.mu.to(u.dtype) + (1 - prior) * total / count
        return -(u * mean).sum(dim=-1) / u.shape[-1] ** 0.5, total


class Zeros(PowerAttention):
    """y_t = sum_i w_ti (R_t q_t / |q_t|) . (R_i k_i / |k_i|) v_i, then a norm per head.

    With S_t the mean of the logits s_1 .. s_t, softmax_i(s) = zeroth + first + second + ...:

        zeroth = 1 / t,  first = (s_i - S_t) / t,  second = ((s_i - S_t)^2 - variance_t) / (2 t)

        w_ti = sigma^1_t first + sigma^h_t (softmax - zeroth - first)
               + sigma^2_t second - sigma^h_t second       with second_order
               + sigma^0_t zeroth                          with zeroth, in the first layer

    Each line sums to zero over i, except for zeroth. With `ordered`, the term of order n that
    sigma^h subtracts is multiplied by gamma^n_(i+1) ... gamma^n_t; the sums then are not zero.

    The softmax itself is one gated sum. Every other term is a polynomial in s_i whose coefficients
    depend on t, and so a combination of gated sums with values s_i^m v_i / t for m = 0, 1, 2. Each
    of those is a running mean, with the gate (t - 1) / t.
    Sources: ZeroS, Lu et al. (2025), arXiv:2602.05230; the notes for ordered and second order.
    """

    scale = 1.0
    has_log_mass = True
    rotary: Rotary

    def __init__(
        self, config: ZerosConfig, model_dim: int, num_heads: int, *, keeps_mean: bool
    ) -> None:
        super().__init__(config, model_dim, num_heads)
        self.rotary = Rotary(self.head_dim, base=config.rotary_base)
        self.qkv = nn.Linear(model_dim, 3 * model_dim, bias=False)
        self.logit = DeviationLogit(model_dim, num_heads)
        self.orders = (0, 1, 2) if config.second_order else (0, 1)
        names = [str(order) for order in self.orders if order or keeps_mean]
        self.sigma = nn.ModuleDict(
            {name: ScalarPerHead(model_dim, num_heads) for name in (*names, "h")}
        )
        self.fading = nn.ModuleList(
            ForgetGate(model_dim, num_heads, config.gate_init)
            for _ in self.orders
            if config.ordered
        )
        # Outputs are sums of small weights of both signs, and the usual eps of 1e-5 would dominate
        # their variance. But both weights of the second token can be almost zero, and at an eps of
        # 1e-12 rounding errors decided the sign of its output.
        self.norm = nn.GroupNorm(num_heads, model_dim, eps=1e-10)
        self.num_sums = 1 + len(self._moments())

    def initial_carried(self, count: int, device: torch.device) -> dict[str, Tensor]:
        zeros = torch.zeros(count, self.num_heads, dtype=torch.float64, device=device)
        carried = super().initial_carried(count, device) | {
            "log_mass": self.initial_log_mass(count, device),
            "sum_u": torch.zeros(count, self.num_heads, self.head_dim, device=device),
            "sum_s": zeros,
        }
        if 2 in self.orders:
            carried["sum_s2"] = zeros.clone()
        return carried

    def pivot_value_scales(self) -> tuple[float, ...]:
        # Pivot tokens take part in the softmax. The means are over real tokens only.
        return (1.0, *(0.0 for _ in self._moments()))

    def project(
        self, x: Float[Tensor, "B T D"], documents: Documents, carried: dict[str, Tensor]
    ) -> tuple[Operands, dict[str, Tensor]]:
        q, k, v = rearrange(self.qkv(x), "b t (s h k) -> s b t h k", s=3, h=self.num_heads)
        after = {"rotation": documents.positions(carried["rotation"])}
        cos, sin = self.rotary.phases(after["rotation"], documents.T, x.dtype)
        q, k = (rotate(normalize(one.to(cos.dtype), dim=-1), cos, sin) for one in (q, k))

        s, after["sum_u"] = self.logit(x, after["rotation"], documents, carried["sum_u"])
        after["sum_s"] = documents.cumsum(s.double(), carried["sum_s"])
        if 2 in self.orders:
            after["sum_s2"] = documents.cumsum(s.double().square(), carried["sum_s2"])
        softmax = key_softmax(s, documents, carried["log_mass"])
        after["log_mass"] = softmax.log_mass

        # sigma^0 may have either sign, as in the paper.
        sigma = {
            name: logit(x).tanh() if name == "0" else logit(x).sigmoid()
            for name, logit in self.sigma.items()
        }
        if self.initial_state is None:
            # The first token's weight on itself is zero: the norm would amplify rounding errors.
            is_later = (after["rotation"] > 1)[..., None]
            sigma = {name: one if name == "0" else one * is_later for name, one in sigma.items()}
        sums = [GatedSum(softmax.log_g, softmax.alpha[..., None], sigma["h"][..., None])]
        sums += self._means(x, s, sigma, after)
        # In float32: the gated sums almost cancel, and 16 bits would leave rounding errors only.
        operands = Operands(q, k, v.to(q.dtype), tuple(sums))
        return operands, {name: documents.last(value) for name, value in after.items()}

    def _terms(self) -> list[tuple[int | None, int, str, int]]:
        """Every term of w_ti except the softmax itself: (forget gate, order, name of sigma, sign).

        The forget gate is an index of `self.fading`, or None.
        """
        added = [(None, int(name), name, 1) for name in self.sigma if name != "h"]
        gates = [order if len(self.fading) else None for order in self.orders]
        subtracted = [
            (gate, order, "h", -1) for gate, order in zip(gates, self.orders, strict=True)
        ]
        return [*added, *subtracted]

    def _moments(self) -> list[tuple[int | None, int]]:
        """Every gated sum except the softmax: (forget gate, power m of s_i)."""
        found = {(gate, m): None for gate, order, _, _ in self._terms() for m in range(order + 1)}
        return list(found)

    def _means(
        self,
        x: Float[Tensor, "B T D"],
        s: Float[Tensor, "B T H"],
        sigma: dict[str, Tensor],
        after: dict[str, Tensor],
    ) -> list[GatedSum]:
        """The gated sums of all terms. Terms with the same gate and power of s_i share one."""
        count = after["rotation"][..., None]
        mean = (after["sum_s"] / count).to(s.dtype)
        coefficients = [[torch.ones_like(s)], [-mean, torch.ones_like(s)]]
        if 2 in self.orders:
            half = torch.full_like(s, 0.5)
            square = (after["sum_s2"] / count).to(s.dtype)
            coefficients.append([mean.square() - square / 2, -mean, half])
        output_scale: dict[tuple[int | None, int], Tensor] = defaultdict(
            lambda: torch.zeros_like(s)
        )
        for gate, order, name, sign in self._terms():
            for m, coefficient in enumerate(coefficients[order]):
                output_scale[gate, m] = output_scale[gate, m] + sign * sigma[name] * coefficient
        log_mean = (-1 / count).log1p().to(s.dtype).expand_as(s)
        log_g: dict[int | None, Tensor] = {None: log_mean}
        for order, forget in enumerate(self.fading):
            log_g[order] = log_mean + forget(x)
        sums = []
        for gate, m in self._moments():
            value_scale = s**m / count.to(s.dtype)
            sums.append(
                GatedSum(log_g[gate], value_scale[..., None], output_scale[gate, m][..., None])
            )
        return sums
