"""Projections to one scalar per token and head, such as gates and key logits.

They are computed in at least float32, whatever the dtype of the activations is.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from longhaul.modules.attention.base import InFloat32, linear_in_float32


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


class ForgetGate(InFloat32):
    """log gamma_t = log sigmoid(W x_t + b), one per head, at least float32.

    The bias of head h is initialised for gamma = 1 - 2^(-5 - h), the decays of retention
    (arXiv:2307.08621), so that training starts with memories of 32 tokens and more.
    """

    def __init__(self, model_dim: int, num_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads, model_dim))
        self.bias = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)
        head = torch.arange(self.bias.numel(), dtype=torch.float64)
        with torch.no_grad():
            # The logit of 1 - 2^(-5 - h), in a form that cannot round to infinity.
            self.bias.copy_(torch.log(2.0 ** (5 + head) - 1))

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T H"]:
        return logsigmoid(linear_in_float32(x, self.weight, self.bias))
