"""The scan that accumulates sums of chunks over a sequence, in either direction of time."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from longhaul.kernels.common.triton.chunking import decay_over_chunk, load_chunk
from longhaul.kernels.power.triton.chunked.sums import Sums
from longhaul.kernels.power.triton.features import carried_multiplicity


def scan(
    parts: Tensor,
    sums: Sums,
    read_dtype: torch.dtype,
    initial: Tensor | None,
    final: Tensor | None,
    other: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """The decayed sum of `parts` before each chunk or, in reverse, after each chunk.

    Args:
        parts: (chunks, G, P, V) or (chunks, G, P) float32; overwritten by a float32 result.
        sums: what the parts are.
        read_dtype: dtype of the result. The running sum itself stays in float32 registers.
        initial: (S, …) initial state of every sequence; in reverse the gradient of its final state.
        final: (S, …) filled with the sum at the end of every sequence.
        other: in reverse, the states before each chunk. Then the second result is the product of
            sum and state at the end of each chunk, (chunks, G) float64, for eq. (19).
    """
    chunks, gates, tiles = sums.chunks, sums.gates, sums.tiles
    G, P = parts.shape[1:3]
    V = parts.shape[3] if parts.ndim == 4 else 1
    read = parts if read_dtype == torch.float32 else torch.empty_like(parts, dtype=read_dtype)
    block_v = triton.next_power_of_2(V)
    block_p = max(1, min(triton.next_power_of_2(P), 2048 // block_v))
    row_blocks = triton.cdiv(P, block_p)
    products = None
    if other is not None:
        products = parts.new_empty(chunks.num, G, row_blocks)
    _power_fwd_scan_kernel[(chunks.sequences.shape[0] * row_blocks, G)](
        parts, read, parts if initial is None else initial, parts if final is None else final,
        parts if other is None else other, parts if products is None else products,
        parts if gates is None else gates.high, parts if gates is None else gates.low, chunks.table,
        chunks.sequences, tiles.table, sums.tokens.x.shape[1], G, P, V, row_blocks,
        DEGREE=sums.degree,
        TILE=tiles.tile,
        BLOCK_P=block_p,
        BLOCK_V=block_v,
        HAS_GATES=gates is not None,
        HAS_INITIAL=initial is not None,
        HAS_FINAL=final is not None,
        HAS_OTHER=other is not None,
        IS_REVERSE=sums.is_reverse,
        # With fewer values than threads, one warp could overwrite what another has yet to load.
        num_warps=4 if block_p * block_v >= 128 else 1,
    )  # fmt: skip
    return read, None if products is None else products.sum(dim=2, dtype=torch.float64)


@triton.jit
def _power_fwd_scan_kernel(
    parts_ptr, read_ptr, initial_ptr, final_ptr, other_ptr, products_ptr, high_ptr, low_ptr,
    chunks_ptr, sequences_ptr, tiles_ptr, T, G, P, V, row_blocks,
    DEGREE: tl.constexpr, TILE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_V: tl.constexpr,
    HAS_GATES: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr,
    HAS_OTHER: tl.constexpr, IS_REVERSE: tl.constexpr,
):  # fmt: skip
    row_block = tl.program_id(0) % row_blocks
    sequence = (tl.program_id(0) // row_blocks).to(tl.int64)
    g = tl.program_id(1).to(tl.int64)
    first = tl.load(sequences_ptr + sequence * 2)
    count = tl.load(sequences_ptr + sequence * 2 + 1).to(tl.int32)
    row = row_block * BLOCK_P + tl.arange(0, BLOCK_P)
    v = tl.arange(0, BLOCK_V)
    mask = (row < P)[:, None] & (v < V)[None, :]
    off = row.to(tl.int64)[:, None] * V + v[None, :]
    state_size = P * V
    multiplicity = carried_multiplicity(tiles_ptr, row, P, DEGREE, TILE, IS_REVERSE)
    running = tl.zeros((BLOCK_P, BLOCK_V), tl.float32)
    if HAS_INITIAL:
        initial = tl.load(initial_ptr + (sequence * G + g) * state_size + off, mask=mask, other=0.0)
        running = initial.to(tl.float32) / multiplicity[:, None]
    for step in range(count):
        chunk = first + (count - 1 - step if IS_REVERSE else step)
        chunk_off = (chunk * G + g) * state_size
        if HAS_OTHER:
            # The state at the end of a chunk is the state before the next one.
            is_inner = step > 0
            state = tl.load(
                other_ptr + chunk_off + G * state_size + off,
                mask=mask & is_inner,
                other=0.0,
            )
            product = tl.sum(running * multiplicity[:, None] * state.to(tl.float32))
            tl.store(products_ptr + (chunk * G + g) * row_blocks + row_block, product)
        # Without a final state nothing has computed the last part.
        is_read = HAS_FINAL | (step + 1 < count)
        part = tl.load(parts_ptr + chunk_off + off, mask=mask & is_read, other=0.0)
        tl.store(read_ptr + chunk_off + off, running.to(read_ptr.dtype.element_ty), mask=mask)
        if HAS_GATES:
            _, batch, _, end, _, _ = load_chunk(chunks_ptr, chunk)
            running *= decay_over_chunk(high_ptr, low_ptr, batch, g, end, T, G)
        running += part
    if HAS_FINAL:
        final_off = (sequence * G + g) * state_size + off
        tl.store(final_ptr + final_off, running * multiplicity[:, None], mask=mask)
