"""Gradients of the gates."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from longhaul.kernels.common.triton.chunking import (
    LOG2_E,
    LOG2_SMALLEST,
    Chunks,
    load_chunk,
)

_BLOCK_T = 1024


def gate_gradient(
    q_dq: Tensor | None,
    k_dk: Tensor,
    after: Tensor,
    log_g: Tensor,
    chunks: Chunks,
    degree: int,
    out: Tensor,
) -> None:
    """Fill out (B, T, G) with eq. (19): sums to the end of the chunk, plus the effect after it.

    Sums over a whole sequence would also be correct, but their rounding errors grow with its
    length, while the effect of a gate is limited by the memory of its head.

    Args:
        q_dq: (B, T, H) float32, q·dq; None if there are no queries.
        k_dk: (B, G, T) float32, k·dk.
        after: (chunks, G) float64, ⟨dS, S⟩ at the end of each chunk.
    """
    _, T, G = log_g.shape
    _power_bwd_gates_kernel[(chunks.num, G)](
        q_dq, k_dk, after, log_g, out, chunks.table, T, G, *log_g.stride(), *out.stride(),
        REPEAT=1 if q_dq is None else q_dq.shape[2] // G,
        DEGREE=degree,
        BLOCK_T=min(_BLOCK_T, triton.next_power_of_2(chunks.size)),
    )  # fmt: skip


@triton.jit
def _sum_from_right(right_sum, right_stop, left_sum, left_stop):
    """Segmented sum from the right: terms to the right of a stop do not reach its left."""
    return left_sum + tl.where(left_stop > 0, 0.0, right_sum), tl.maximum(right_stop, left_stop)


@triton.jit
def _power_bwd_gates_kernel(
    q_dq_ptr, k_dk_ptr, after_ptr, log_g_ptr, out_ptr, chunks_ptr, T, G,
    stride_b, stride_t, stride_g, stride_ob, stride_ot, stride_og,
    REPEAT: tl.constexpr, DEGREE: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1).to(tl.int64)
    _, batch, start, end, _, _ = load_chunk(chunks_ptr, chunk)
    length = (end - start).to(tl.int32)
    log_g_ptr += batch * stride_b + start * stride_t + g * stride_g
    out_ptr += batch * stride_ob + start * stride_ot + g * stride_og
    carried = tl.load(after_ptr + chunk * G + g)
    t = tl.arange(0, BLOCK_T)
    for back in range(0, tl.cdiv(length, BLOCK_T)):
        first = (tl.cdiv(length, BLOCK_T) - 1 - back) * BLOCK_T
        token = (first + t).to(tl.int64)
        mask = token < length
        follows = token + 1 < length
        difference = -tl.load(
            k_dk_ptr + (batch * G + g) * T + start + token, mask=mask, other=0.0
        ).to(tl.float64)  # fmt: skip
        if q_dq_ptr is not None:
            row_off = (batch * T + start + token) * (G * REPEAT) + g * REPEAT
            for repeat in tl.static_range(REPEAT):
                difference += tl.load(q_dq_ptr + row_off + repeat, mask=mask, other=0.0).to(
                    tl.float64
                )
        difference /= DEGREE
        own = tl.load(log_g_ptr + token * stride_t, mask=mask, other=0.0) * LOG2_E
        next_one = tl.load(log_g_ptr + (token + 1) * stride_t, mask=follows, other=0.0) * LOG2_E
        stop = (next_one < LOG2_SMALLEST).to(tl.int32)
        total, stopped = tl.associative_scan((difference, stop), 0, _sum_from_right, reverse=True)
        total += tl.where(stopped > 0, 0.0, carried)
        gradient = tl.where(own < LOG2_SMALLEST, 0.0, total)
        tl.store(out_ptr + token * stride_ot, gradient.to(out_ptr.dtype.element_ty), mask=mask)
        carried = tl.sum(tl.where(t == 0, total, 0.0))
