"""Gradients of the gates."""

from __future__ import annotations

from math import log

import torch
from torch import Tensor

from longhaul.kernels.common.decays import log2_smallest
from longhaul.kernels.common.segments import sum_within, tokens_since


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
    is_reset = log_g / log(2) < log2_smallest(k_dk.dtype)
    change = change.flip(1)
    if not log_g.is_meta and not is_reset[:, 1:].any():
        return change.cumsum(dim=1).flip(1).masked_fill(is_reset, 0)
    # Flipped, a segment begins with the token before a reset.
    is_first = torch.cat([is_reset[:, :1], is_reset.flip(1)[:, :-1]], dim=1)
    return sum_within(change, tokens_since(is_first)).flip(1).masked_fill(is_reset, 0)
