"""The decays of state-space models: a rate for each head, times a step for each token."""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import softplus

from longhaul.modules.attention.base import Float32Parameters

_SHORTEST, _LONGEST = 1e-3, 0.1  # steps at first, which are log-uniform between them


class TimeStep(Float32Parameters):
    """dt_t = softplus(f_t + dt_bias) and log g_t = -exp(A_log) dt_t, in at least float32.

    A is uniform between two bounds at first, and softplus(dt_bias) log-uniform in [1e-3, 0.1].
    Neither has weight decay, which would draw rates and steps to 1 and ln 2. A bound b has log g_t
    = -b sigmoid(A (f_t + dt_bias)) in their place, which is never below -b, and A = 1 at first.
    Source: Mamba-2 (2024), arXiv:2405.21060, and the code that its authors published.
    """

    def __init__(
        self,
        heads: int,
        *,
        rates: tuple[float, float],
        per_head: int = 1,
        bound: float | None = None,
    ) -> None:
        """per_head: steps of a head, such as one for each channel of its keys, next to another."""
        super().__init__()
        self.rates = rates if bound is None else (1.0, 1.0)
        self.bound = bound
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads * per_head))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.A_log.is_meta:
            return  # As in meta_device.py.
        # Drawn in float32 whatever the dtype of the parameters: 16 bits would round a rate to 0.
        rate = torch.empty_like(self.A_log, dtype=torch.float32).uniform_(*self.rates)
        # A rate below the draw's resolution would have a log of -inf.
        self.A_log.copy_(rate.clamp(min=0.01).log())
        bounds = math.log(_SHORTEST), math.log(_LONGEST)
        step = torch.empty_like(self.dt_bias, dtype=torch.float32).uniform_(*bounds).exp()
        self.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus

    def forward(
        self, f: Float[Tensor, "B T steps"]
    ) -> tuple[Float[Tensor, "B T steps"], Float[Tensor, "B T steps"]]:
        """Steps, and log gates."""
        exact = torch.promote_types(f.dtype, torch.float32)
        f = f.to(exact) + self.dt_bias.to(exact)
        dt = softplus(f)
        rate = self.A_log.to(exact).exp().repeat_interleave(len(self.dt_bias) // len(self.A_log))
        return dt, -rate * dt if self.bound is None else -self.bound * torch.sigmoid(rate * f)
