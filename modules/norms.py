"""Norms of activations (..., D)."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) times w or, with an offset, times 1 + w.

    It is computed in at least float32 and has the dtype of x. With an offset w starts at 0 and
    keeps the bits that 1 + w would lose in bfloat16, as in Gemma (2024), arXiv:2403.08295. Source:
    Zhang and Sennrich (2019), arXiv:1910.07467.
    """

    def __init__(self, width: int, *, eps: float, has_offset: bool = False) -> None:
        super().__init__()
        self.eps = eps
        self.has_offset = has_offset
        self.weight = nn.Parameter(torch.zeros(width) if has_offset else torch.ones(width))

    def forward(self, x: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows D"]:
        # All in one dtype, else torch leaves its fused kernel.
        exact = torch.promote_types(x.dtype, torch.float32)
        w = self.weight.to(exact)
        w = 1 + w if self.has_offset else w
        return F.rms_norm(x.to(exact), w.shape, w, self.eps).to(x.dtype)
