"""Gradients of the gates."""

from __future__ import annotations

from math import log

import torch
from torch import Tensor

from longhaul.kernels.power.torch.chunking import log2_smallest


def gate_gradient(
    log_g: Tensor,
    row_sums: Tensor | None,
    k_dk: Tensor,
    degree: int,
    finals: tuple[tuple[Tensor | None, Tensor | None], ...],
) -> Tensor:
    """Suffix sums of dG_t = Σ_i w_ti dw_ti − Σ_s w_st dw_st, eq. (15), in float64.

    The second sum is k·dk / p, because weights are homogeneous in k. A suffix stops at a reset,
    after which nothing depends on earlier gates.

    Args:
        row_sums: (B, T, G) the first sum; None means 0.
        k_dk: (B, T, G) k·dk, in the dtype of accumulation.
        finals: for kv and for norm, the gradient of the final state and the final state.
    """
    change = -k_dk.double() / degree  # (B, T, G)
    if row_sums is not None:
        change += row_sums
    for gradient, final in finals:
        if gradient is not None and final is not None:
            change[:, -1] += (gradient * final).flatten(2).sum(dim=2)
    suffix = change.flip(1).cumsum(dim=1).flip(1)
    is_reset = log_g / log(2) < log2_smallest(k_dk.dtype)
    T = log_g.shape[1]
    time = torch.arange(T, device=log_g.device)[None, :, None]
    next_reset = time.where(is_reset, T).flip(1).cummin(dim=1).values.flip(1)
    after = suffix.gather(1, next_reset.clamp(max=T - 1)).masked_fill(next_reset == T, 0)
    return (suffix - after).masked_fill(is_reset, 0)
