"""States of all chunks in one pass: each program walks through a sequence.

A program keeps the running sum of one block of features and values in registers, so the sums of
chunks are never written. Only as many programs run as there are blocks, heads and sequences,
however long these are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from longhaul.kernels.common.triton.chunking import decay_over_chunk, load_chunk
from longhaul.kernels.common.triton.launch import launch
from longhaul.kernels.power.triton.chunked.sums import Sums, sum_of_tokens
from longhaul.kernels.power.triton.features import carried_multiplicity
from longhaul.kernels.power.triton.tile_sizes import WALK


def walk(
    sums: Sums,
    read_dtype: torch.dtype,
    initial: Tensor | None,
    final: Tensor | None,
    other: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """`chunk_sums` and `scan` in one, with their results; the norm apart."""
    x, V = sums.tokens.x, sums.tokens.y.shape[3]
    chunks, tiles, G = sums.chunks, sums.tiles, sums.G
    num_sequences = chunks.sequences.shape[0]
    kv = x.new_empty(chunks.num, G, tiles.P, V, dtype=read_dtype)
    products = None
    if other is not None:
        products = x.new_empty(chunks.num, G, tiles.num_blocks * sums.v_blocks, dtype=torch.float32)
    launch(
        _power_fwd_walk_kernel,
        lambda _: (num_sequences * tiles.num_blocks, sums.v_blocks, G),
        WALK.of(x.dtype, is_narrow=sums.is_narrow), *sums.arguments(kv), kv,
        kv if initial is None else initial, kv if final is None else final,
        kv if other is None else other, kv if products is None else products, chunks.table,
        chunks.sequences, tiles.table, *sums.sizes(),
        NUM_BLOCKS=tiles.num_blocks,
        AT_ONCE=tiles.at_once,
        BLOCK_F=sums.block_f,
        BLOCK_V=sums.block_v,
        HAS_INITIAL=initial is not None,
        HAS_FINAL=final is not None,
        HAS_OTHER=other is not None,
        **sums.constants(),
    )  # fmt: skip
    return kv, None if products is None else products.sum(dim=2, dtype=torch.float64)


@triton.jit
def _power_fwd_walk_kernel(
    x_ptr, y_ptr, inverse_ptr, delta_ptr, high_ptr, low_ptr, kv_ptr, initial_ptr, final_ptr,
    other_ptr, products_ptr, chunks_ptr, sequences_ptr, tiles_ptr,
    stride_xb, stride_xt, stride_xh, stride_yb, stride_yt, stride_yh, T, G, K, V, P, factor,
    NUM_BLOCKS: tl.constexpr, REPEAT: tl.constexpr, DEGREE: tl.constexpr, TILE: tl.constexpr,
    AT_ONCE: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_T: tl.constexpr,
    HAS_GATES: tl.constexpr, HAS_INVERSE: tl.constexpr, HAS_DELTA: tl.constexpr,
    HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr, HAS_OTHER: tl.constexpr,
    IS_REVERSE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0) % NUM_BLOCKS
    sequence = (tl.program_id(0) // NUM_BLOCKS).to(tl.int64)
    g = tl.program_id(2).to(tl.int64)
    first = tl.load(sequences_ptr + sequence * 2)
    count = tl.load(sequences_ptr + sequence * 2 + 1).to(tl.int32)
    f = block * BLOCK_F + tl.arange(0, BLOCK_F)
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask = (f < P)[:, None] & (v < V)[None, :]
    multiplicity = carried_multiplicity(tiles_ptr, f, P, DEGREE, TILE, IS_REVERSE)[:, None]
    running = tl.zeros((BLOCK_F, BLOCK_V), tl.float32)
    if HAS_INITIAL:
        off = ((sequence * G + g) * P + f)[:, None] * V + v[None, :]
        initial = tl.load(initial_ptr + off, mask=mask, other=0.0)
        running = initial.to(tl.float32) / multiplicity
    for step in range(count):
        chunk = first + (count - 1 - step if IS_REVERSE else step)
        # Computed for each chunk, as an address would take two registers between them.
        off = ((chunk * G + g) * P + f)[:, None] * V + v[None, :]
        if HAS_OTHER:
            # The state at the end of a chunk is the state before the next one.
            state = tl.load(other_ptr + off + G * P * V, mask=mask & (step > 0), other=0.0)
            product = tl.sum(running * multiplicity * state.to(tl.float32))
            row = (chunk * G + g) * NUM_BLOCKS + block
            tl.store(products_ptr + row * tl.cdiv(V, BLOCK_V) + tl.program_id(1), product)
        tl.store(kv_ptr + off, running.to(kv_ptr.dtype.element_ty), mask=mask)
        _, batch, start, end, _, _ = load_chunk(chunks_ptr, chunk)
        length = (end - start).to(tl.int32)
        if not HAS_FINAL:
            # Nothing reads what the last chunk adds.
            length = tl.where(step + 1 < count, length, 0)
        # Not added to the running sum at once: matrix units truncate each sum, so errors of one
        # sign would add up over a sequence.
        kv, _ = sum_of_tokens(
            x_ptr, y_ptr, inverse_ptr, delta_ptr, high_ptr, low_ptr, tiles_ptr,
            stride_xb, stride_xt, stride_xh, stride_yb, stride_yt, stride_yh, T, G, K, V,
            batch, g, start, length, block, v,
            REPEAT, DEGREE, TILE, AT_ONCE, BLOCK_F, BLOCK_V, BLOCK_T,
            HAS_GATES, HAS_INVERSE, HAS_DELTA, False, IS_REVERSE, DOT, PRECISION,
        )  # fmt: skip
        if HAS_GATES:
            running *= decay_over_chunk(high_ptr, low_ptr, batch, g, end, T, G)
        running += kv * factor
    if HAS_FINAL:
        off = ((sequence * G + g) * P + f)[:, None] * V + v[None, :]
        tl.store(final_ptr + off, running * multiplicity, mask=mask)
