"""Cross-entropy of rows of logits, which it may overwrite with their gradient."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longhaul.kernels.backend import Backend, uses_triton, why_dtype_unsupported


def softcapped(logits: Float[Tensor, "*shape"], cap: float) -> Float[Tensor, "*shape"]:
    """cap tanh(logits / cap), which is between -cap and cap. Source: Gemma 2, arXiv:2408.00118."""
    return cap * torch.tanh(logits / cap)


def cross_entropy_(
    logits: Float[Tensor, "rows vocabulary"],
    target: Int[Tensor, " rows"],
    *,
    with_gradient: bool,
    softcap: float | None = None,
    z_loss: float = 0.0,
    backend: Backend = "auto",
) -> tuple[Float[Tensor, " rows"], Float[Tensor, " rows"]]:
    """-log softmax(y)[target] and log sum exp y of each row y of logits, in at least float32.

    On a GPU a row is read twice and written once: at a vocabulary of 50,304 in bfloat16, 302 kB.
    Separate operations in float32 move 2.4 MB.

    Args:
        logits: contiguous. With `with_gradient` they become the gradient of the sum of all losses
            and of z_loss (log sum exp y)^2, rounded to their dtype; otherwise they are kept.
        target: an id for each row. For one outside of the vocabulary, torch raises an error on a
            CPU; on a GPU the loss of the row is NaN.
        softcap: y is `softcapped(logits, softcap)`; None: the logits themselves.
        z_loss: factor of a loss that is not part of the result, but of the gradient.
        backend: "torch", "triton" (not for float64) or "auto".

    Raises:
        ValueError: if the logits are not contiguous.
    """
    if not logits.is_contiguous():
        raise ValueError(f"logits: found strides {logits.stride()}, wanted a contiguous tensor")
    if uses_triton(backend, logits.device, why_dtype_unsupported(logits.dtype)):
        # Triton takes long to import, and may not be installed.
        from longhaul.kernels.cross_entropy import triton

        return triton.cross_entropy_(
            logits, target, with_gradient=with_gradient, softcap=softcap, z_loss=z_loss
        )
    y = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap is not None:
        y = softcapped(y, softcap)
    wanted = target[:, None]
    normalizer = y.logsumexp(1, keepdim=True)
    losses = (normalizer - y.gather(1, wanted))[:, 0]
    if with_gradient:
        slope = None if softcap is None else 1 - (y / softcap).square()
        y.sub_(normalizer).exp_()
        if z_loss:
            y.mul_(1 + 2 * z_loss * normalizer)
        y.scatter_(1, wanted, y.gather(1, wanted) - 1)
        logits.copy_(y if slope is None else y.mul_(slope))
    return losses, normalizer[:, 0]
