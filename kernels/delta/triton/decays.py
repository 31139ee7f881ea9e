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
def over_chunk(g, CHANNELS: tl.constexpr):
    """Decay over the whole chunk, for each key channel or for all: (BLOCK_K, 1) or (1, 1)."""
    decay = exp2_flushed(tl.sum(g, axis=0))
    return decay[:, None] if CHANNELS else tl.full((1, 1), 0.0, tl.float32) + decay


@triton.jit
def pairs_at(c, size):
    """Of the pairs (t, i) those in the second and in the first half of one block of 2 size."""
    t, i = c[:, None], c[None, :]
    return (t // (2 * size) == i // (2 * size)) & (t // size % 2 == 1) & (i // size % 2 == 0)


@triton.jit
def halves_at(g, g_after, c, SIZE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr):
    """Decays from the start of a half to each of its tokens, and from the token to its end."""
    blocks: tl.constexpr = BLOCK_C // SIZE
    later = tl.cumsum(tl.reshape(g, (blocks, SIZE, BLOCK_K)), axis=1)
    inner = tl.where((c % SIZE != SIZE - 1)[:, None], g_after, 0.0)
    earlier = tl.cumsum(tl.reshape(inner, (blocks, SIZE, BLOCK_K)), axis=1, reverse=True)
    later = tl.reshape(later, (BLOCK_C, BLOCK_K))
    earlier = tl.reshape(earlier, (BLOCK_C, BLOCK_K))
    return exp2_flushed(later), exp2_flushed(earlier)


@triton.jit
def decay_between(g, c):
    """(BLOCK_C, BLOCK_C): from after token i to token t, its own gate included; 0 where i > t."""
    t, i = c[:, None], c[None, :]
    # Of column i the gates after token i alone: a product with zeros and ones, which only adds.
    after = tl.where(t > i, g[:, None], 0.0)
    logs = tl.dot(tl.where(t >= i, 1.0, 0.0), after, input_precision="ieee")
    return tl.where(t >= i, exp2_flushed(logs), 0.0)


@triton.jit
def faded_scores(
    x, k, g, g_after, between, c,
    CHANNELS: tl.constexpr, LEVELS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """<x, k>: for i <= t the product of x_t and k_i as it has faded, else 0; (3) and (4)."""
    if CHANNELS:
        own = tl.sum(x.to(tl.float32) * k.to(tl.float32), axis=1)
        scores = tl.where(c[:, None] == c[None, :], own[:, None], 0.0)
        for level in tl.static_range(LEVELS):
            later, earlier = halves_at(g, g_after, c, 1 << level, BLOCK_C, BLOCK_K)
            rows, columns = (x * later).to(DOT), (k * earlier).to(DOT)
            found = tl.dot(rows, tl.trans(columns), input_precision=PRECISION)
            scores += tl.where(pairs_at(c, 1 << level), found, 0.0)
        return scores
    else:  # noqa: RET505
        return tl.dot(x, tl.trans(k), input_precision=PRECISION) * between


@triton.jit
def inverse_of_unit_lower(a, c, LEVELS: tl.constexpr, EXACT: tl.constexpr):
    """(I + a)^-1 of a strictly lower triangular a, blocks merged by (16) from size 1 on."""
    inverse = tl.where(c[:, None] == c[None, :], 1.0, 0.0)
    # A loop at run time: unrolled, its products would spill registers.
    for level in range(0, LEVELS):
        below = tl.where(pairs_at(c, 1 << level), a, 0.0)
        merged = tl.dot(below, inverse, input_precision=EXACT)
        inverse -= tl.dot(inverse, merged, input_precision=EXACT)
    return inverse
