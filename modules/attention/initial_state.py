"""A learned state before the first token: what a few pivot tokens would leave behind."""

import torch
from jaxtyping import Float
from torch import Tensor, nn


class InitialState(nn.Module):
    """Keys W_a and values W_b of `rank` pivot tokens a head, at position 0 of every document.

    They leave S_0 = sum_r phi(a_r) b_r^T, which at degree 1 is the low-rank state W_a W_b^T, and
    are then rotated and forgotten like any tokens. Values begin at zero.
    Source: Quantum-Inspired Linear Attention, "Fine-tuning".
    """

    def __init__(
        self, num_heads: int, key_dim: int, value_dim: int, rank: int, *, has_log_mass: bool
    ) -> None:
        """has_log_mass: where keys are weighed by a softmax, also the log of the pivots' mass."""
        super().__init__()
        self.key = nn.Parameter(torch.empty(num_heads, rank, key_dim))
        self.value = nn.Parameter(torch.empty(num_heads, rank, value_dim))
        self.log_mass = nn.Parameter(torch.empty(num_heads)) if has_log_mass else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.key, std=self.key.shape[-1] ** -0.5)
        nn.init.zeros_(self.value)
        if self.log_mass is not None:
            nn.init.zeros_(self.log_mass)

    def forward(self) -> tuple[Float[Tensor, "1 rank H K"], Float[Tensor, "1 rank H V"]]:
        """Keys and values as a document of `rank` tokens."""
        return self.key.transpose(0, 1)[None], self.value.transpose(0, 1)[None]
