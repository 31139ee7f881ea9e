"""Norms of activations (..., D)."""

from typing import Any

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
        return _normed(x.to(exact), w, self.eps).to(x.dtype)


class QueryKeyNorm(RMSNorm):
    """An RMSNorm whose gain w is rounded to the dtype of x, but not 1 + w.

    Queries and keys have 16 bits under autocast, and torch's fused kernel, which makes no copies
    of them in float32, wants a gain of their dtype.
    """

    def forward(self, x: Float[Tensor, "*rows K"]) -> Float[Tensor, "*rows K"]:
        if self.has_offset:
            return super().forward(x)
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


def _normed(x: Tensor, w: Tensor, eps: float) -> Tensor:
    if x.is_cuda or torch.compiler.is_compiling():
        return F.rms_norm(x, w.shape, w, eps)
    return _RMSNorm.apply(x, w, eps)  # type: ignore[no-any-return, no-untyped-call]


class _RMSNorm(torch.autograd.Function):
    """Keeps x for backward, as the fused kernel of GPUs does; torch on a CPU keeps x / |x| too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.eps = eps
        return x * _inverse(x, eps) * w

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, w = ctx.saved_tensors
        # Computed again from x, so that this can be differentiated once more.
        inverse = _inverse(x, ctx.eps)
        normed, dnormed = x * inverse, dy * w
        dx = inverse * (dnormed - normed * (dnormed * normed).mean(-1, keepdim=True))
        return dx, (dy * normed).flatten(0, -2).sum(0), None


def _inverse(x: Tensor, eps: float) -> Tensor:
    """Of the root of the mean square, (..., 1)."""
    return (x.square().mean(-1, keepdim=True) + eps).rsqrt()
