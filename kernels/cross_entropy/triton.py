"""A program for each row: the largest logit and the sum of exponentials in one pass, then a second
pass that replaces the logits by their gradient."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_LARGEST_BLOCK = 4096


def cross_entropy_(
    logits: Tensor, target: Tensor, *, with_gradient: bool, softcap: float | None, z_loss: float
) -> tuple[Tensor, Tensor]:
    rows, vocabulary = logits.shape
    losses, normalizers = (logits.new_empty(rows, dtype=torch.float32) for _ in range(2))
    with torch.cuda.device_of(logits):  # Triton launches on the current device
        _cross_entropy_kernel[(rows,)](
            logits,
            target.contiguous(),
            losses,
            normalizers,
            vocabulary,
            softcap or 0.0,
            2 * z_loss,
            BLOCK=min(_LARGEST_BLOCK, triton.next_power_of_2(vocabulary)),
            WITH_GRADIENT=with_gradient,
            WITH_CAP=softcap is not None,
            num_warps=8,
        )
    return losses, normalizers


@triton.jit
def _tanh(x):
    """Both ends are exact; the absolute error is that of 1 in float32."""
    e = tl.exp(-2 * tl.abs(x))
    return tl.where(x < 0, e - 1, 1 - e) / (1 + e)


@triton.jit
def _cross_entropy_kernel(
    logits_ptr, target_ptr, losses_ptr, normalizers_ptr, vocabulary, softcap, twice_z_loss,
    BLOCK: tl.constexpr, WITH_GRADIENT: tl.constexpr, WITH_CAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * vocabulary
    # Loaded before the sums, whose barriers then keep other warps from overwriting it too early.
    wanted = tl.load(target_ptr + row)
    is_known = (wanted >= 0) & (wanted < vocabulary)
    wanted_logit = tl.load(logits_ptr + wanted, mask=is_known, other=float("nan")).to(tl.float32)
    if WITH_CAP:
        wanted_logit = softcap * _tanh(wanted_logit / softcap)
    column = tl.arange(0, BLOCK)
    # Not -inf, whose difference from a first block of -inf would be NaN.
    largest = tl.full((), -3e38, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for first in range(0, vocabulary, BLOCK):
        mask = first + column < vocabulary
        x = tl.load(logits_ptr + first + column, mask=mask, other=float("-inf")).to(tl.float32)
        if WITH_CAP:
            x = tl.where(mask, softcap * _tanh(x / softcap), float("-inf"))
        larger = tl.maximum(largest, tl.max(x, 0))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(x - larger), 0)
        largest = larger
    normalizer = largest + tl.log(total)
    tl.store(losses_ptr + row, normalizer - wanted_logit)
    tl.store(normalizers_ptr + row, normalizer)
    if WITH_GRADIENT:
        factor = 1 + twice_z_loss * normalizer
        for first in range(0, vocabulary, BLOCK):
            place = first + column
            x = tl.load(logits_ptr + place, mask=place < vocabulary, other=0.0).to(tl.float32)
            slope = 1.0
            if WITH_CAP:
                capped = _tanh(x / softcap)
                slope = 1 - capped * capped
                x = softcap * capped
            gradient = factor * tl.exp(x - normalizer) - tl.where(place == wanted, 1.0, 0.0)
            tl.store(
                logits_ptr + place,
                (gradient * slope).to(logits_ptr.dtype.element_ty),
                mask=place < vocabulary,
            )
