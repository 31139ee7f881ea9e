"""Both ends of the model: the embedding, with learned positions if it has any, and the head."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64, Int
from torch import Tensor, nn

from longhaul.kernels.cross_entropy import softcapped
from longhaul.modules.attention.base import product_flops
from longhaul.modules.cross_entropy import RowLosses, linear_cross_entropy


class Embedding(nn.Embedding):
    """Rows of a matrix, times a factor."""

    def __init__(self, rows: int, width: int, scale: float) -> None:
        super().__init__(rows, width)
        self.scale = scale

    def forward(self, tokens: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape D"]:
        x = super().forward(tokens)
        return x if self.scale == 1 else x * self.scale


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


def as_logits(x: Float[Tensor, "*shape"], softcap: float | None) -> Float[Tensor, "*shape"]:
    """Products with the head's matrix in at least float32, soft-capped if there is a cap."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x if softcap is None else softcapped(x, softcap)


class Head(nn.Module):
    """Logits h E^T with the matrix E of another module, or their mean cross-entropy.

    This is a module because sharding strategies gather parameters around module calls.
    """

    def __init__(self, holder: nn.Embedding | nn.Linear, softcap: float | None) -> None:
        super().__init__()
        self.softcap = softcap
        # In a tuple, so that the matrix is not registered again: it has one name in checkpoints.
        self._holder = (holder,)

    def forward(
        self,
        hidden: Float[Tensor, "rows D"],
        target: Int[Tensor, "rows"] | None = None,
        row_losses: RowLosses | None = None,
        z_loss: float = 0.0,
    ) -> Tensor:
        """Logits (rows, vocabulary), or with a target the mean loss, computed in pieces."""
        weight = self._holder[0].weight
        if target is None:
            return as_logits(F.linear(hidden, weight), self.softcap)
        device = hidden.device.type
        is_autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if is_autocast else hidden.dtype
        return linear_cross_entropy(
            hidden, weight, target, dtype, row_losses, softcap=self.softcap, z_loss=z_loss
        )

    def flops_per_token(self) -> int:
        """Forward FLOPs per token."""
        return product_flops(self._holder[0])
