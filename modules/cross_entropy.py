"""The mean cross-entropy of a linear head, without the logits of all rows at once."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from longhaul.kernels.backend import resolve_backend
from longhaul.kernels.cross_entropy import cross_entropy_

# Rows of logits computed at a time: 1,024 x 50,304 float32 are 206 MB.
ROWS_AT_ONCE = 1024


def _rows_at_once(x: Tensor) -> int:
    """Four times as many where a kernel makes no copies in float32: 412 MB in bfloat16."""
    return ROWS_AT_ONCE * (4 if resolve_backend("auto", x.device) == "triton" else 1)


class RowLosses:
    """Receives the loss of each row, and the log of the sum of the exponentials of its logits.

    It is no tensor, because sharding strategies replace tensors that they hand to a module.
    """

    def __init__(self) -> None:
        self._pieces: list[tuple[Tensor, Tensor]] = []

    def add(self, losses: Float[Tensor, "piece"], normalizers: Float[Tensor, "piece"]) -> None:
        self._pieces.append((losses, normalizers))

    def all(self) -> Float[Tensor, "rows"]:
        """The losses of all rows, in nats."""
        return torch.cat([losses for losses, _ in self._pieces])

    def normalizers(self) -> Float[Tensor, "rows"]:
        """The logs of the sums of all rows."""
        return torch.cat([normalizers for _, normalizers in self._pieces])


def linear_cross_entropy(
    hidden: Float[Tensor, "rows D"],
    weight: Float[Tensor, "vocabulary D"],
    target: Int[Tensor, "rows"],
    dtype: torch.dtype,
    row_losses: RowLosses | None = None,
    *,
    softcap: float | None = None,
    z_loss: float = 0.0,
) -> Float[Tensor, ""]:
    """Mean of -log softmax(y)[target] + z_loss (log sum exp y)^2, in at least float32.

    y are the logits hidden weight^T, or `softcapped` ones.

    Both gradients are computed with the loss, piece by piece, so that the logits of a piece are
    computed once. Sums over pieces are in at least float32.

    Args:
        hidden: final activations.
        weight: the matrix of the head.
        target: the token that follows each row.
        dtype: of the operands of all matrix products.
        row_losses: receives the cross-entropy of each row.
        softcap: of the logits; None: they have none.
        z_loss: factor of what keeps the logits from drifting away. Source: PaLM, Chowdhery et al.
            (2022), arXiv:2204.02311, section 5.
    """
    needs = [torch.is_grad_enabled() and x.requires_grad for x in (hidden, weight)]
    options = {"softcap": softcap, "z_loss": z_loss}
    loss: Tensor = _LinearCrossEntropy.apply(
        hidden, weight, target, dtype, needs, row_losses, options
    )  # type: ignore[no-untyped-call]
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        dtype: torch.dtype,
        needs: list[bool],
        row_losses: RowLosses | None,
        options: dict[str, Any],
    ) -> Tensor:
        exact = torch.promote_types(dtype, torch.float32)
        total = hidden.new_zeros((), dtype=exact)
        w = weight.to(dtype)
        dhidden = torch.empty_like(hidden) if needs[0] else None
        dweight = torch.zeros_like(weight, dtype=exact) if needs[1] else None
        step = _rows_at_once(hidden)
        for start in range(0, len(target), step):
            rows = slice(start, start + step)
            h = hidden[rows].to(dtype)
            logits = F.linear(h, w)
            losses, normalizers = cross_entropy_(
                logits, target[rows], with_gradient=any(needs), **options
            )
            total += losses.sum()
            if options["z_loss"]:
                total += options["z_loss"] * normalizers.square().sum()
            if row_losses is not None:
                row_losses.add(losses, normalizers)
            # From here on the logits hold their gradient.
            if dhidden is not None:
                dhidden[rows] = logits @ w
            if dweight is not None:
                dweight += logits.T @ h
            del logits  # before the next piece is allocated
        ctx.save_for_backward(dhidden, dweight)
        ctx.num_rows, ctx.weight_dtype = len(target), weight.dtype
        return total / len(target)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        dhidden, dweight = ctx.saved_tensors
        scale = dloss / ctx.num_rows
        return (
            None if dhidden is None else (dhidden * scale).to(dhidden.dtype),
            None if dweight is None else (dweight * scale).to(ctx.weight_dtype),
            None, None, None, None, None,
        )  # fmt: skip
