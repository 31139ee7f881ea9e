"""A learned initial state: the state that a few learned pivot tokens would leave."""

import torch
from jaxtyping import Float
from torch import Tensor, nn


class InitialState(nn.Module):
    """Learned keys W_a and values W_b of `rank` pivot tokens per head.

    The pivot tokens stand at position 0 of every document. They leave the state
    S_0 = sum_r phi(a_r) b_r^T, which at degree 1 is the low-rank matrix W_a W_b^T. Rotation and
    decay then act on them as on any other token. Values are initialised to zero, so that a trained
    model begins as it is; the source does not say how they begin.
    Source: Quantum-Inspired Linear Attention, "Fine-tuning".
    """

    def __init__(
        self, num_heads: int, key_dim: int, value_dim: int, rank: int, *, num_log_masses: int
    ) -> None:
        """Variants that weigh values by softmaxes over key logits also learn their log masses.

        These are the log-sum-exps of the pivot tokens' logits, one per head and softmax.
        """
        super().__init__()
        self.key = nn.Parameter(torch.empty(num_heads, rank, key_dim))
        self.value = nn.Parameter(torch.empty(num_heads, rank, value_dim))
        self.log_mass = nn.Parameter(torch.empty(num_log_masses)) if num_log_masses else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.key, std=self.key.shape[-1] ** -0.5)
        nn.init.zeros_(self.value)
        if self.log_mass is not None:
            nn.init.zeros_(self.log_mass)

    def forward(
        self,
    ) -> tuple[Float[Tensor, "1 rank H K"], Float[Tensor, "1 rank H V"], Float[Tensor, "S"] | None]:
        """Keys and values in the shape of a document of `rank` tokens, and the log masses."""
        return self.key.transpose(0, 1)[None], self.value.transpose(0, 1)[None], self.log_mass
