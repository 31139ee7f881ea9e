"""Splitting a call into chunks, and the running sums of its gates.

A sequence is a row of the batch or a packed document, and no chunk spans two of them. Every kernel
looks up its chunk in a table, so that no kernel depends on whether a call is packed.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# A log2 gate is clamped to the first; a log2 decay below the second counts as 0: README, section 6.
LOG2_RESET = tl.constexpr(-192.0)
LOG2_SMALLEST = tl.constexpr(-64.0)
LOG2_E = tl.constexpr(1.4426950408889634)
_BLOCK_T = 1024


class Chunks(NamedTuple):
    """Chunks of at most `size` tokens, in order, and the range of chunks of every sequence."""

    table: Tensor  # (chunks, 6) int64: sequence, batch, start, end, sequence's start and end
    sequences: Tensor  # (S, 2) int64: first chunk, number of chunks
    size: int  # tokens
    is_packed: bool  # Then lengths of sequences are known on the device alone.

    @property
    def num(self) -> int:
        """Rows of the table. If the call is packed, the last rows may be empty chunks."""
        return self.table.shape[0]


def cut(B: int, T: int, size: int, cu_seqlens: Tensor | None, device: torch.device) -> Chunks:
    """The chunks of a call, without waiting for the device even if it is packed."""
    if cu_seqlens is None:
        return _cut_rows(B, T, size, device)
    offsets = cu_seqlens.long()
    starts, ends = offsets[:-1], offsets[1:]
    counts = (ends - starts + size - 1) // size
    after = counts.cumsum(0)
    # The number of chunks depends on data, so the table has as many rows as this upper bound.
    number = torch.arange(T // size + len(starts), device=device)
    sequence = torch.searchsorted(after, number, right=True).clamp_(max=len(starts) - 1)
    first = after - counts
    start = starts[sequence] + (number - first[sequence]) * size
    start = torch.minimum(start, ends[sequence])
    end = torch.minimum(start + size, ends[sequence])
    columns = (sequence, torch.zeros_like(start), start, end, starts[sequence], ends[sequence])
    sequences = torch.stack((first, counts), dim=1)
    return Chunks(torch.stack(columns, dim=1), sequences, size, is_packed=True)


# Tables are kept for good, here and wherever a launcher caches one: a captured CUDA graph, or a
# kernel that still runs on another stream, reads a table that nothing in Python refers to. They are
# copied from the CPU, so that they are there for every stream; a capture, which forbids the copy,
# finds them if the call has run before. 48 bytes for each chunk of each length that occurs.
@cache
def _cut_rows(B: int, T: int, size: int, device: torch.device) -> Chunks:
    count = triton.cdiv(T, size)
    batch = torch.arange(B).repeat_interleave(count)
    start = torch.arange(0, T, size).repeat(B)
    end = (start + size).clamp_(max=T)
    table = torch.stack((batch, batch, start, end, batch * 0, batch * 0 + T), dim=1)
    first = torch.arange(B) * count
    sequences = torch.stack((first, torch.full_like(first, count)), dim=1)
    return Chunks(table.to(device), sequences.to(device), size, is_packed=False)


@triton.jit
def load_chunk(table_ptr, chunk):
    """Sequence, batch, start and end of one chunk, and start and end of its sequence."""
    row_ptr = table_ptr + chunk.to(tl.int64) * 6
    return (
        tl.load(row_ptr),
        tl.load(row_ptr + 1),
        tl.load(row_ptr + 2),
        tl.load(row_ptr + 3),
        tl.load(row_ptr + 4),
        tl.load(row_ptr + 5),
    )


@triton.jit
def exp2_flushed(x):
    """2^x, and exactly 0 below 2^−64, so that a reset cannot leak even into a scaled sum."""
    return tl.where(x < LOG2_SMALLEST, 0.0, tl.exp2(x))


@triton.jit
def decay_over_chunk(high_ptr, low_ptr, batch, g, end, T, G):
    """The decay from the start of a chunk to its end."""
    last_off = (batch * G + g) * T + end - 1
    return exp2_flushed(tl.load(high_ptr + last_off) + tl.load(low_ptr + last_off))


class Gates(NamedTuple):
    """Sums of log2 γ from the start of each chunk, as float32 pairs: high + low has 48 bits.

    So a difference of two sums is exact to its own float32 rounding, even next to a reset.
    """

    high: Tensor  # (B, G, T) float32
    low: Tensor  # (B, G, T) float32


def sum_gates(log_g: Tensor, chunks: Chunks) -> Gates:
    """Eq. (3): float64 sums, each split into two float32."""
    B, T, G = log_g.shape
    high, low = (log_g.new_empty(B, G, T, dtype=torch.float32) for _ in range(2))
    _power_fwd_gates_kernel[(chunks.num, G)](
        log_g,
        high,
        low,
        chunks.table,
        T,
        G,
        *log_g.stride(),
        BLOCK_T=min(_BLOCK_T, triton.next_power_of_2(chunks.size)),
    )
    return Gates(high, low)


@triton.jit
def _power_fwd_gates_kernel(
    log_g_ptr, high_ptr, low_ptr, table_ptr, T, G, stride_b, stride_t, stride_g,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    _, batch, start, end, _, _ = load_chunk(table_ptr, tl.program_id(0))
    g = tl.program_id(1).to(tl.int64)
    log_g_ptr += batch * stride_b + g * stride_g
    out_off = (batch * G + g) * T
    carried = tl.full((), 0.0, tl.float64)
    for block in range(start, end, BLOCK_T):
        t = block + tl.arange(0, BLOCK_T)
        mask = t < end
        log_g = tl.load(log_g_ptr + t * stride_t, mask=mask, other=0.0)
        log2_g = tl.maximum(log_g.to(tl.float64) * LOG2_E, LOG2_RESET)
        total = carried + tl.cumsum(log2_g, axis=0)
        high = total.to(tl.float32)
        tl.store(high_ptr + out_off + t, high, mask=mask)
        tl.store(low_ptr + out_off + t, (total - high.to(tl.float64)).to(tl.float32), mask=mask)
        carried += tl.sum(log2_g, axis=0)
