"""Projections to one scalar per token and head, such as gates and key logits.

They are computed in at least float32, whatever the dtype of the activations is.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from longhaul.modules.attention.base import AttentionConfig, InFloat32, linear_in_float32


class ScalarPerHead(InFloat32):
    """W x_t, one scalar per head."""

    def __init__(self, model_dim: int, num_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads, model_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T H"]:
        return linear_in_float32(x, self.weight)


@dataclass(frozen=True, kw_only=True)
class ForgetGateConfig(AttentionConfig):
    """The option of variants with forget gates."""

    gate_init: str = "long_memory"
    """plain (gamma = sigmoid(W x), no bias) | long_memory (with one, initially gamma near 1)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gate_init not in ("plain", "long_memory"):
            raise ValueError(f"gate_init: found {self.gate_init!r}, wanted plain or long_memory")


class ForgetGate(InFloat32):
    """log gamma_t = log sigmoid(W x_t), or log sigmoid(W x_t + b), one per head, at least float32.

    gate_init "plain" is the published gate, without b: gamma is near 1/2 at first, and half of the
    state is gone after each token. "long_memory" is not published for these variants: the bias of
    head h is initialised for gamma = 1 - 2^(-5 - h), the decays of retention (arXiv:2307.08621), so
    that training starts with memories of 32 tokens and more.
    Source: Conformal Transformations for Symmetric Power Transformers (2025), section 3.1, which
    does not say how W is initialised; we draw it from N(0, 0.02^2), as GPT-2 does.
    """

    def __init__(self, model_dim: int, num_heads: int, gate_init: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads, model_dim))
        self.bias = nn.Parameter(torch.empty(num_heads)) if gate_init == "long_memory" else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)
        if self.bias is None:
            return
        head = torch.arange(self.bias.numel(), dtype=torch.float64)
        with torch.no_grad():
            # The logit of 1 - 2^(-5 - h), in a form that cannot round to infinity.
            self.bias.copy_(torch.log(2.0 ** (5 + head) - 1))

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T H"]:
        return logsigmoid(linear_in_float32(x, self.weight, self.bias))
