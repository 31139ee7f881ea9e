"""Both ends of the model, which know its vocabulary: the embedding and the head."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
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
