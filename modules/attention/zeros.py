"""ZeroS: softmax over key logits without its constant term, so that weights sum to zero."""

from collections import defaultdict
from dataclasses import dataclass

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import normalize

from longhaul.modules.attention.base import Attention, RotaryConfig, register
from longhaul.modules.attention.gates import ForgetGate, PerHead
from longhaul.modules.attention.key_softmax import key_softmax
from longhaul.modules.attention.power import Operands, PowerAttention, PowerConfig, Read
from longhaul.modules.documents import Documents
from longhaul.modules.rotary import Rotary, rotate


@register("zeros")
@dataclass(frozen=True, kw_only=True)
class ZerosConfig(RotaryConfig, PowerConfig):
    """Which terms of the softmax's expansion are taken apart."""

    zeroth: str = "none"
    """none | first_layer: keep the mean of the values there, times tanh(W_0 x)."""

    second_order: bool = False
    """Take the second-order term out of the rest, with a gate of its own."""

    ordered: bool = False
    """Subtracted terms fade with forget gates, a product of them for each order."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.zeroth not in ("none", "first_layer"):
            raise ValueError(f"zeroth: found {self.zeroth!r}, wanted none or first_layer")

    def build(self, model_dim: int, num_heads: int, layer: int = 0) -> Attention:
        return Zeros(self, model_dim, num_heads, keeps_mean=self.zeroth != "none" and layer == 0)


class DeviationLogit(nn.Module):
    """s_i = -u_i . m_i / sqrt(K): how far u_i = W_u x_i points away from its smoothed mean.

    m_i = (e^tau mu + u_1 + ... + u_i) / (e^tau + i), with a learned prior mu.
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
        """Logits, and the sums of u up to every token, at least in float32."""
        u = rearrange(self.project(x), "b t (h k) -> b t h k", h=self.num_heads)
        u = u.to(torch.promote_types(u.dtype, torch.float32))
        total = documents.cumsum(u, sum_u).to(u.dtype)
        count = count[..., None, None].to(u.dtype)
        prior = (self.tau.to(u.dtype)[:, None] - count.log()).sigmoid()  # e^tau / (e^tau + i)
        mean = prior * self.mu.to(u.dtype) + (1 - prior) * total / count
        return -(u * mean).sum(dim=-1) / u.shape[-1] ** 0.5, total


class Zeros(PowerAttention):
    """y_t = sum_i w_ti (R_t q_t / |q_t|) . (R_i k_i / |k_i|) v_i, then a norm a head.

    With the mean S_t of the logits s_1 .. s_t, softmax_i(s) = zeroth + first + second + ...:

        zeroth = 1 / t,  first = (s_i - S_t) / t,  second = ((s_i - S_t)^2 - variance_t) / (2 t)

        w_ti = sigma^1_t first + sigma^h_t (softmax - zeroth - first)
               + sigma^2_t second - sigma^h_t second       with second_order
               + sigma^0_t zeroth                          with zeroth, in the first layer

    Each sums to zero over i, zeroth alone apart. ordered multiplies what sigma^h subtracts of order
    n by gamma^n_(i+1) ... gamma^n_t; the sums are then no longer zero.

    A term is a polynomial in s_i whose coefficients depend on t, so all are reads of the op with
    values s_i^m v_i / t, each a running mean (gate (t - 1) / t), next to the softmax's own read.
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
        self.sigma = nn.ModuleDict({name: PerHead(model_dim, num_heads) for name in (*names, "h")})
        self.fading = nn.ModuleList(
            ForgetGate(model_dim, num_heads) for _ in self.orders if config.ordered
        )
        # A sum of small weights of both signs: the usual 1e-5 would be most of a head's variance.
        # A second token's two weights can vanish: with 1e-12 their rounding alone decided its sign.
        self.norm = nn.GroupNorm(num_heads, model_dim, eps=1e-10)
        self.num_reads = 1 + len(self._moments())

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

    def pivot_columns(self) -> tuple[float, ...]:
        # Pivot tokens are competitors in the softmax; the means are over real tokens.
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

        # sigma^0 may take either sign, as the paper has it.
        sigma = {
            name: logit(x).tanh() if name == "0" else logit(x).sigmoid()
            for name, logit in self.sigma.items()
        }
        if self.initial_state is None:
            # A first token weighs itself with zero: the norm would be given nothing but rounding.
            is_later = (after["rotation"] > 1)[..., None]
            sigma = {name: one if name == "0" else one * is_later for name, one in sigma.items()}
        reads = [Read(softmax.log_g, softmax.alpha[..., None], sigma["h"][..., None])]
        reads += self._means(x, s, sigma, after)
        # In float32, since the reads all but cancel: their rounding in 16 bits would be the output.
        operands = Operands(q, k, v.to(q.dtype), tuple(reads))
        return operands, {name: documents.last(value) for name, value in after.items()}

    def _terms(self) -> list[tuple[int | None, int, str, int]]:
        """Gate product, order, sigma and sign of every term besides the softmax itself."""
        kept = [(None, int(name), name, 1) for name in self.sigma if name != "h"]
        fading = [order if len(self.fading) else None for order in self.orders]
        subtracted = [
            (chain, order, "h", -1) for chain, order in zip(fading, self.orders, strict=True)
        ]
        return [*kept, *subtracted]

    def _moments(self) -> list[tuple[int | None, int]]:
        """Gate product and power m of s_i of every read besides the softmax's."""
        found = {(chain, m): None for chain, order, _, _ in self._terms() for m in range(order + 1)}
        return list(found)

    def _means(
        self,
        x: Float[Tensor, "B T D"],
        s: Float[Tensor, "B T H"],
        sigma: dict[str, Tensor],
        after: dict[str, Tensor],
    ) -> list[Read]:
        """The reads of all terms, those of one moment and gate product together."""
        count = after["rotation"][..., None]
        mean = (after["sum_s"] / count).to(s.dtype)
        coefficients = [[torch.ones_like(s)], [-mean, torch.ones_like(s)]]
        if 2 in self.orders:
            half = torch.full_like(s, 0.5)
            square = (after["sum_s2"] / count).to(s.dtype)
            coefficients.append([mean.square() - square / 2, -mean, half])
        rows: dict[tuple[int | None, int], Tensor] = defaultdict(lambda: torch.zeros_like(s))
        for chain, order, gate, sign in self._terms():
            for m, coefficient in enumerate(coefficients[order]):
                rows[chain, m] = rows[chain, m] + sign * sigma[gate] * coefficient
        log_mean = (-1 / count).log1p().to(s.dtype).expand_as(s)
        log_g: dict[int | None, Tensor] = {None: log_mean}
        for order, forget in enumerate(self.fading):
            log_g[order] = log_mean + forget(x)
        reads = []
        for chain, m in self._moments():
            column = s**m / count.to(s.dtype)
            reads.append(Read(log_g[chain], column[..., None], rows[chain, m][..., None]))
        return reads
