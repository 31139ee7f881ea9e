"""Norms of activations (..., D), and of queries and keys."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) times w or, with an offset, times 1 + w.

    It is computed in at least float32 and has the dtype of x, to which w is rounded, but not 1 + w.
    With an offset w starts at 0 and keeps the bits that 1 + w would lose in bfloat16, as in Gemma
    (2024), arXiv:2403.08295. Source: Zhang and Sennrich (2019), arXiv:1910.07467.
    """

    def __init__(self, width: int, *, eps: float, has_offset: bool = False) -> None:
        super().__init__()
        self.eps = eps
        self.has_offset = has_offset
        self.weight = nn.Parameter(torch.zeros(width) if has_offset else torch.ones(width))

    def forward(self, x: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows D"]:
        # All in one dtype, else torch leaves its fused kernel: queries and keys have 16 bits under
        # autocast, and their gain has not.
        if not self.has_offset:
            return _normed(x, self.weight.to(x.dtype), self.eps)
        exact = torch.promote_types(x.dtype, torch.float32)
        return _normed(x.to(exact), 1 + self.weight.to(exact), self.eps).to(x.dtype)


def _normed(x: Tensor, w: Tensor, eps: float) -> Tensor:
    if x.is_cuda or torch.compiler.is_compiling():
        return F.rms_norm(x, w.shape, w, eps)
    return _RMSNorm.apply(x, w, eps)  # type: ignore[no-any-return, no-untyped-call]


class _RMSNorm(torch.autograd.Function):
    """As torch's on a CPU, to the bit, but it keeps x alone for backward, as the kernel of GPUs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.eps = eps
        exact = x.to(torch.promote_types(x.dtype, torch.float32))
        return (exact * _inverse(exact, eps) * w).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, w = ctx.saved_tensors
        exact = x.to(torch.promote_types(x.dtype, torch.float32))
        # Computed again from x, so that this can be differentiated once more.
        inverse = _inverse(exact, ctx.eps)
        dy = dy.to(exact.dtype)
        dnormed = dy * w
        dinverse = (dnormed * exact).sum(-1, keepdim=True)
        dmean = -0.5 * dinverse * inverse.pow(3) / x.shape[-1]
        dx = dnormed * inverse + dmean * (2 * exact)
        dw = (dy * (exact * inverse)).sum_to_size(w.shape)
        return dx.to(x.dtype), dw.to(w.dtype), None


def _inverse(x: Tensor, eps: float) -> Tensor:
    """Of the root of the mean square, (..., 1)."""
    return (x.square().mean(-1, keepdim=True) + eps).rsqrt()
