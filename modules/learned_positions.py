"""Learned positions, which are added to the embedding."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64
from torch import Tensor, nn


class LearnedPositions(nn.Module):
    """x_t + w_t with a learned vector for every position t of a document, as in GPT-2."""

    def __init__(self, positions: int, model_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(positions, model_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)

    def forward(
        self, x: Float[Tensor, "B T D"], position: Float64[Tensor, "#B T"] | None = None
    ) -> Float[Tensor, "B T D"]:
        """Args:
            x: embedded tokens.
            position: that of each token in its document, 1 and up; None: rows are documents.

        Raises ValueError where x has more tokens than there are positions.
        """
        if position is None:
            self.check_length(x.shape[1])
            return x + self.weight[: x.shape[1]]
        return x + F.embedding(position.long() - 1, self.weight)

    def check_length(self, tokens: int) -> None:
        """Raise ValueError where so many tokens are more than there are positions."""
        if tokens > len(self.weight):
            raise ValueError(
                f"model.learned_positions: found {tokens} tokens, wanted at most "
                f"{len(self.weight)}, the positions that the model has learned"
            )
