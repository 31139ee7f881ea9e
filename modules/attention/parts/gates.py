"""Scalars per token and head: forget gates, learned or fixed, and key logits.

They are computed in at least float32, whatever the dtype of the activations is.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from longhaul.modules.attention.base import AttentionConfig, Float32Parameters, linear_in_float32


class ScalarPerHead(Float32Parameters):
    """W x_t, one scalar per head."""

    def __init__(self, model_dim: int, num_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads, model_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T H"]:
        return linear_in_float32(x, self.weight)


class LowRank(Float32Parameters):
    """W_2 W_1 x_t, or with a bias of zeros at first, one number per channel of the keys."""

    def __init__(self, model_dim: int, rank: int, channels: int, *, bias: bool = False) -> None:
        super().__init__()
        self.down_weight = nn.Parameter(torch.empty(rank, model_dim))
        self.up_weight = nn.Parameter(torch.empty(channels, rank))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.down_weight, std=0.02)
        nn.init.normal_(self.up_weight, std=0.02)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T channels"]:
        f = linear_in_float32(linear_in_float32(x, self.down_weight), self.up_weight)
        return f if self.bias is None else f + self.bias


@dataclass(frozen=True, kw_only=True)
class ForgetGateConfig(AttentionConfig):
    """The option of variants with forget gates.

    A gate is learned with gate data or learned, generator product or full, or ordered true,
    whichever of these options the kind has.
    """

    gate_init: Literal["plain", "long_memory"] = "plain"
    """plain (sigmoid(W x), no bias) | long_memory (a bias, gamma near 1); if a gate is learned."""


@dataclass(frozen=True, kw_only=True)
class GateConfig(ForgetGateConfig):
    """The options of variants that choose among kinds of gates."""

    gate: Literal["data", "learned", "retention", "alibi"] = "data"
    """data (sigmoid(W x)) | learned (a number per head) | retention, alibi (fixed, per head)."""

    def build_gate(self, model_dim: int, num_heads: int) -> nn.Module:
        """A module from x (B, T, D) to log gates (B, T, H)."""
        if self.gate == "data":
            return ForgetGate(model_dim, num_heads, self.gate_init)
        if self.gate == "learned":
            return LearnedGate(num_heads, self.gate_init)
        return FixedGate(num_heads, self.gate)


class ForgetGate(Float32Parameters):
    """log gamma_t = log sigmoid(W x_t), or log sigmoid(W x_t + b), one per head, at least float32.

    gate_init "plain" is the published gate, without b: gamma is near 1/2 at first, and half of the
    state is gone after each token. "long_memory" is not published for these variants: the bias of
    head h is initialised for gamma = 1 - 2^(-5 - h), the decays of retention (arXiv:2307.08621), so
    that training starts with memories of 32 tokens and more.
    Source: Conformal Transformations for Symmetric Power Transformers (2025), section 3.1, which
    does not say how W is initialised; we draw it from N(0, 0.02^2), as GPT-2 does.
    """

    def __init__(
        self, model_dim: int, num_heads: int, gate_init: str, *, per_head: int = 1
    ) -> None:
        """With per_head above 1, the gates of one head stand next to each other."""
        super().__init__()
        self.per_head = per_head
        gates = num_heads * per_head
        self.weight = nn.Parameter(torch.empty(gates, model_dim))
        self.bias = nn.Parameter(torch.empty(gates)) if gate_init == "long_memory" else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)
        if self.bias is not None:
            _remember_long_(self.bias, self.per_head)

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T H"]:
        logits = linear_in_float32(x, self.weight)
        return logsigmoid(logits if self.bias is None else logits + self.bias)


class LearnedGate(Float32Parameters):
    """log gamma = log sigmoid(b), a learned number per head, the same for every token.

    gate_init "plain" begins with b = 0, gamma = 1/2; "long_memory" with gamma = 1 - 2^(-5 - h).
    Source: Conformal Transformations for Symmetric Power Transformers (2025), section 3.1, "gating
    values can also be learnable parameters"; it gives neither their form nor how they begin, so
    both are as in the gate that depends on the data.
    """

    def __init__(self, num_heads: int, gate_init: str) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(num_heads))
        self.remembers_long = gate_init == "long_memory"
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.bias)
        if self.remembers_long:
            _remember_long_(self.bias)

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T H"]:
        dtype = torch.promote_types(x.dtype, torch.float32)
        return logsigmoid(self.bias.to(dtype)).expand(*x.shape[:2], -1)


class FixedGate(nn.Module):
    """log gamma, a fixed number per head, the same for every token.

    "retention" has gamma = 1 - 2^(-5 - h), "alibi" gamma = exp(-m) with the slopes m of ALiBi.
    Source: Sun et al. (2023), arXiv:2307.08621; Conformal Transformations for Symmetric Power
    Transformers (2025), section A.1, which shows that ALiBi is this gate.
    """

    def __init__(self, num_heads: int, gate: str) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.gate = gate

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T H"]:
        if self.gate == "retention":
            return log_decays(x, self.num_heads)
        log_g = -alibi_slopes(self.num_heads, x.device)
        return log_g.to(torch.promote_types(x.dtype, torch.float32)).expand(*x.shape[:2], -1)


def log_decays(x: Float[Tensor, "B T D"], num_heads: int) -> Float[Tensor, "B T H"]:
    """log(1 - 2^(-5 - h)), h = 0, 1, ..., at every token of x: memories of 32, 64, ... tokens."""
    head = torch.arange(num_heads, dtype=torch.float64, device=x.device)
    decays = torch.log1p(-(2.0 ** (-5 - head))).to(torch.promote_types(x.dtype, torch.float32))
    return decays.expand(*x.shape[:2], -1)


def alibi_slopes(num_heads: int, device: torch.device) -> Float64[Tensor, "H"]:
    """2^(-8 h / n), h = 1 .. n, with n the largest power of two up to H.

    The other H - n heads get every second slope of the sequence for 2 n heads.
    """
    n = 1 << (num_heads.bit_length() - 1)
    head = torch.arange(num_heads, dtype=torch.float64, device=device)
    return 2.0 ** torch.where(head < n, -8 * (head + 1) / n, -4 * (2 * (head - n) + 1) / n)


def _remember_long_(bias: Float[Tensor, "gates"], per_head: int = 1) -> None:
    """Fill a bias with the logits of 1 - 2^(-5 - h), in a form that cannot round to infinity."""
    head = (torch.arange(bias.numel()) // per_head).double()
    with torch.no_grad():
        bias.copy_(torch.log(2.0 ** (5 + head) - 1))
