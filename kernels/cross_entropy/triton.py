"""A program for each row: the largest logit and the sum of exponentials in one pass, then a second
pass that replaces the logits by their gradient."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_LARGEST_BLOCK = 4096


def cross_entropy_(logits: Tensor, target: Tensor, *, with_gradient: bool) -> Tensor:
    rows, vocabulary = logits.shape
    losses = logits.new_empty(rows, dtype=torch.float32)
    with torch.cuda.device_of(logits):  # Triton launches on the current device
        _cross_entropy_kernel[(rows,)](
            logits,
            target.contiguous(),
            losses,
            vocabulary,
            BLOCK=min(_LARGEST_BLOCK, triton.next_power_of_2(vocabulary)),
            WITH_GRADIENT=with_gradient,
            num_warps=8,
        )
    return losses


@triton.jit
def _cross_entropy_kernel(
    logits_ptr, target_ptr, losses_ptr, vocabulary,
    BLOCK: tl.constexpr, WITH_GRADIENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * vocabulary
    # Loaded before the sums, whose barriers then keep other warps from overwriting it too early.
    wanted = tl.load(target_ptr + row)
    is_known = (wanted >= 0) & (wanted < vocabulary)
    wanted_logit = tl.load(logits_ptr + wanted, mask=is_known, other=float("nan")).to(tl.float32)
    column = tl.arange(0, BLOCK)
    # Not -inf, whose difference from a first block of -inf would be NaN.
    largest = tl.full((), -3e38, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for first in range(0, vocabulary, BLOCK):
        mask = first + column < vocabulary
        x = tl.load(logits_ptr + first + column, mask=mask, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(largest, tl.max(x, 0))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(x - larger), 0)
        largest = larger
    normalizer = largest + tl.log(total)
    tl.store(losses_ptr + row, normalizer - wanted_logit)
    if WITH_GRADIENT:
        for first in range(0, vocabulary, BLOCK):
            place = first + column
            x = tl.load(logits_ptr + place, mask=place < vocabulary, other=0.0).to(tl.float32)
            gradient = tl.exp(x - normalizer) - tl.where(place == wanted, 1.0, 0.0)
            tl.store(
                logits_ptr + place,
                gradient.to(logits_ptr.dtype.element_ty),
                mask=place < vocabulary,
            )
