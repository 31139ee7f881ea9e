"""Symmetric-power attention: a kernel (q . k)^p with a state of fixed size."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float, Float64, Int
from torch import Tensor, nn

from longhaul.kernels import PowerState, power_attention, power_attention_step, symmetric_dim
from longhaul.kernels.power.cost import choose_form, power_flops
from longhaul.modules.attention.base import (
    Attention,
    AttentionConfig,
    linear_in_float32,
    register,
)
from longhaul.modules.rotary import accumulate, frequencies, phases, rotate


@register("sympow")
@dataclass(frozen=True, kw_only=True)
class SympowConfig(AttentionConfig):
    """Options that all symmetric-power kinds share."""

    degree: int = 2
    """Even power p of the kernel (q . k)^p."""

    longest_document: int = 65_536
    """N in the rotation rates theta_j = 2 pi / N^(2 (j - 1) / K), tokens."""

    chunk_size: int | None = None
    """Tokens a chunk of the chunked form; None lets the cost model choose. Never the result."""

    def __post_init__(self) -> None:
        if self.degree < 2 or self.degree % 2:
            raise ValueError(f"degree: found {self.degree}, wanted an even number of 2 or more")
        if self.longest_document < 2:
            raise ValueError(f"longest_document: found {self.longest_document}, wanted 2 or more")

    def build(self, model_dim: int, num_heads: int) -> Attention:
        return Sympow(self, model_dim, num_heads)


class SympowState(NamedTuple):
    """All that the past leaves behind."""

    power: PowerState
    rotation: Float64[Tensor, "B"]  # mu of the last token, in tokens


class ForgetGate(nn.Module):
    """log gamma_t = log sigmoid(W x_t + b), one a head, float32.

    The bias starts head h at gamma = 1 - 2^(-5 - h) (the decays of retention, arXiv:2307.08621), so
    that training begins with memories of 32 tokens and longer.
    """

    def __init__(self, model_dim: int, num_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads, model_dim))
        self.bias = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)
        decay = 1 - 2.0 ** (-5 - torch.arange(self.bias.numel(), dtype=torch.float32))
        with torch.no_grad():
            self.bias.copy_(torch.logit(decay))

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T H"]:
        return nn.functional.logsigmoid(linear_in_float32(x, self.weight, self.bias))


class RotationRate(nn.Module):
    """beta_t = 1 + tanh(W x_t): one a layer, in tokens of fixed rotation, float32."""

    def __init__(self, model_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, model_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T"]:
        return 1 + linear_in_float32(x, self.weight).squeeze(-1).tanh()


class Sympow(Attention):
    """y_t = sum_i w_ti v_i / sum_i w_ti, w_ti = (q_t . k_i)^p, q and k rotated by t theta.

    Subclasses set `gate` (w_ti is multiplied by gamma_(i+1) ... gamma_t) and `rate` (the rotation
    becomes mu_t = mu_(t-1) + beta_t theta).
    Source: Symmetric Power Transformers, Buckman, Gelada, Zhang (2024).
    """

    def __init__(self, config: SympowConfig, model_dim: int, num_heads: int) -> None:
        super().__init__(model_dim, num_heads)
        self.config = config
        self.qkv = nn.Linear(model_dim, 3 * model_dim, bias=False)
        self.out = nn.Linear(model_dim, model_dim, bias=False)
        self.gate: ForgetGate | None = None
        self.rate: RotationRate | None = None

    def project(
        self,
        x: Float[Tensor, "B T D"],
        start: Float64[Tensor, "B"] | None = None,
        cu_seqlens: Int[Tensor, "documents_plus_1"] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Float[Tensor, "B T H"] | None, Float64[Tensor, "B T"]]:
        """Rotated q and k, v, all (B, T, H, K); log gates; the rotation mu of every token."""
        q, k, v = rearrange(self.qkv(x), "b t (s h k) -> s b t h k", s=3, h=self.num_heads)
        rates = x.new_ones(x.shape[:2]) if self.rate is None else self.rate(x)
        rotation = accumulate(rates, start, cu_seqlens)
        dtype = torch.promote_types(x.dtype, torch.float32)
        turns = frequencies(self.head_dim, self.config.longest_document, x.device)
        cos, sin = phases(rotation, turns, dtype)
        log_g = None if self.gate is None else self.gate(x)
        return rotate(q, cos, sin), rotate(k, cos, sin), v, log_g, rotation

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        state: SympowState | None = None,
        *,
        cu_seqlens: Int[Tensor, "documents_plus_1"] | None = None,
        keep_state: bool = True,
    ) -> tuple[Float[Tensor, "B T D"], SympowState | None]:
        start = None if state is None else state.rotation
        q, k, v, log_g, rotation = self.project(x, start, cu_seqlens)
        mixed, power = power_attention(
            q, k, v, log_g,
            degree=self.config.degree,
            initial_state=None if state is None else state.power,
            output_final_state=keep_state,
            cu_seqlens=cu_seqlens,
            chunk_size=self.config.chunk_size,
        )  # fmt: skip
        new_state = None if power is None else SympowState(power, rotation[:, -1])
        return self.out(rearrange(mixed, "b t h k -> b t (h k)")), new_state

    def step(
        self, x: Float[Tensor, "B 1 D"], state: SympowState
    ) -> tuple[Float[Tensor, "B 1 D"], SympowState]:
        q, k, v, log_g, rotation = self.project(x, state.rotation)
        mixed, power = power_attention_step(state.power, q, k, v, log_g, degree=self.config.degree)
        y = self.out(rearrange(mixed, "b t h k -> b t (h k)"))
        return y, SympowState(power, rotation[:, -1])

    def weights(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B H T T"]:
        q, k, _, log_g, _ = self.project(x)
        scores = torch.einsum("bthk,bihk->bhti", q, k) / self.head_dim**0.5
        scores = scores**self.config.degree
        if log_g is not None:
            past = log_g.cumsum(dim=1).transpose(1, 2)  # (B, H, T)
            scores = scores * (past[..., :, None] - past[..., None, :]).tril().exp()
        weights: Tensor = scores.tril()
        return weights / weights.sum(dim=-1, keepdim=True)

    def flops_per_token(self, T: int) -> int:
        extra = sum(2 * module.weight.numel() for module in (self.gate, self.rate) if module)
        K, degree = self.head_dim, self.config.degree
        form = choose_form(T, K, K, degree)
        mixing = power_flops(T, K, K, degree, form, self.config.chunk_size)
        return 8 * self.model_dim**2 + extra + self.num_heads * mixing // T

    def state_size(self) -> int | None:
        features = symmetric_dim(self.head_dim, self.config.degree)
        return self.num_heads * features * (self.head_dim + 1)
