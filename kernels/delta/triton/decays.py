"""Decays inside a chunk, and products of tokens that fade by them: README.md, section 3.

Logs are base 2. Where one gate holds for all key channels, the decay between two tokens is a factor
of their product, and its log a sum of the gates between them. Where each channel has a gate, pairs
of tokens are taken at the size s = 1, 2, 4, ... at which they are in two halves of a block: then
the decay is a factor of both tokens, each at most 1. Sums are only added, never subtracted, so a
gate of 0 needs no case of its own.
"""

import triton
import triton.language as tl

from longhaul.kernels.common.triton.chunking import LOG2_E, LOG2_RESET, exp2_flushed


@triton.jit
def load_gates(
    g_ptr, start, end, stride_t, c, kk, K, CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Log gates of the tokens of a chunk, and of the token after each of them in the chunk.

    (BLOCK_C, BLOCK_K) with CHANNELS, else (BLOCK_C,).
    """
    own, after = c < end - start, c + 1 < tl.minimum(end - start, BLOCK_C)
    at = g_ptr + (start + c) * stride_t
    if CHANNELS:
        at = at[:, None] + kk[None, :]
        own, after = own[:, None] & (kk < K)[None, :], after[:, None] & (kk < K)[None, :]
    g = tl.load(at, mask=own, other=0.0).to(tl.float32) * LOG2_E
    later = tl.load(at + stride_t, mask=after, other=0.0).to(tl.float32) * LOG2_E
    return tl.maximum(g, LOG2_RESET), tl.maximum(later, LOG2_RESET)


@triton.jit
def from_start(g, CHANNELS: tl.constexpr):
    """Decay from the start of the chunk to each token, its own gate included, as a column."""
    decay = exp2_flushed(tl.cumsum(g, axis=0))
    return decay if CHANNELS else decay[:, None]


@triton.jit
def to_end(g_after, CHANNELS: tl.constexpr):
    """Decay from after each token to the end of the chunk, as a column."""
    decay = exp2_flushed(tl.cumsum(g_after, axis=0, reverse=True))
    return decay if CHANNELS else decay[:, None]


@triton.jit
def over_chunk(g):
    """Decay over the whole chunk, for each key channel or for all."""
    return exp2_flushed(tl.sum(g, axis=0))


@triton.jit
def from_on(x, SIZE: tl.constexpr):
    """Of each token, the sum over it and the later ones of its block of SIZE tokens."""
    tokens: tl.constexpr = x.shape[0]
    width: tl.constexpr = x.shape[1]
    blocks = tl.reshape(x, (tokens // SIZE, SIZE, width))
    return tl.reshape(tl.cumsum(blocks, axis=1, reverse=True), (tokens, width))


@triton.jit
def before(x, SIZE: tl.constexpr):
    """Of each token, the sum over the earlier ones of its block of SIZE tokens."""
    tokens: tl.constexpr = x.shape[0]
    width: tl.constexpr = x.shape[1]
    blocks = tl.reshape(x, (tokens // SIZE, SIZE, width))
    return tl.reshape(tl.cumsum(blocks, axis=1), (tokens, width)) - x


@triton.jit
def pairs_of_halves(c, size):
    """Of the pairs (t, i) those in the second and in the first half of one block of 2 size."""
    t, i = c[:, None], c[None, :]
    return (t // (2 * size) == i // (2 * size)) & (t // size % 2 == 1) & (i // size % 2 == 0)


@triton.jit
def halves_at(g, g_after, c, SIZE: tl.constexpr):
    """Decays from the start of a half to each of its tokens, and from the token to its end."""
    tokens: tl.constexpr = g.shape[0]
    width: tl.constexpr = g.shape[1]
    later = tl.cumsum(tl.reshape(g, (tokens // SIZE, SIZE, width)), axis=1)
    earlier = from_on(tl.where((c % SIZE != SIZE - 1)[:, None], g_after, 0.0), SIZE)
    return exp2_flushed(tl.reshape(later, (tokens, width))), exp2_flushed(earlier)


@triton.jit
def decay_between(g, c):
    """(BLOCK_C, BLOCK_C): from after token i to token t, its own gate included; 0 where i > t."""
    t, i = c[:, None], c[None, :]
    logs = tl.cumsum(tl.where(t > i, g[:, None], 0.0), axis=0)
    return tl.where(t >= i, exp2_flushed(logs), 0.0)


@triton.jit
def inverse_of_unit_lower(a, c, EXACT: tl.constexpr):
    """(I + a)^-1 of a strictly lower triangular a: blocks of 16 by substitution, merged by (16)."""
    SIZE: tl.constexpr = 16
    tokens: tl.constexpr = a.shape[0]
    blocks: tl.constexpr = tokens // SIZE
    block, r = tl.arange(0, blocks), tl.arange(0, SIZE)
    is_own = block[:, None, None, None] == block[None, None, :, None]
    own = tl.sum(tl.where(is_own, tl.reshape(a, (blocks, SIZE, blocks, SIZE)), 0.0), axis=2)
    part = tl.where((r[:, None] == r[None, :])[None, :, :], 1.0, tl.zeros_like(own))
    for row in range(1, SIZE):
        is_row = (r == row)[None, :, None]
        factors = tl.sum(tl.where(is_row, own, 0.0), axis=1)
        found = tl.sum(factors[:, :, None] * part, axis=1)
        part -= tl.where(is_row, found[:, None, :], 0.0)
    inverse = tl.reshape(tl.where(is_own, part[:, :, None, :], 0.0), (tokens, tokens))
    size = SIZE
    # A loop at run time: unrolled, its products would spill registers.
    while size < tokens:
        below = tl.where(pairs_of_halves(c, size), a, 0.0)
        merged = tl.dot(below, inverse, input_precision=EXACT)
        inverse -= tl.dot(inverse, merged, input_precision=EXACT)
        size *= 2
    return inverse
