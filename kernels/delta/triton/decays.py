"""Decays inside a chunk, and products of tokens that fade by them: README.md, section 3.

Logs are base 2. Where one gate holds for all key channels, the decay between two tokens is a factor
of their product, and its log a sum of the gates between them. Where each channel has a gate, pairs
of tokens are taken at the size s = 1, 2, 4, ... at which they are in two halves of a block: then
the decay is a factor of both tokens, each at most 1. Sums are only added, never subtracted, so a
gate of 0 needs no case of its own. With a gate for each channel, matrix units add them, as products
with zeros and ones.
"""

import triton
import triton.language as tl

from longhaul.kernels.common.triton.chunking import LOG2_E, LOG2_RESET, exp2_flushed


@triton.jit
def load_gates(g_ptr, start, end, stride_t, c, kk, K, CHANNELS: tl.constexpr):
    """Log gates of a chunk: (BLOCK_C, BLOCK) with CHANNELS, else (BLOCK_C,)."""
    at, is_there = g_ptr + (start + c) * stride_t, c < end - start
    if CHANNELS:
        at, is_there = at[:, None] + kk[None, :], is_there[:, None] & (kk < K)[None, :]
    g = tl.load(at, mask=is_there, other=0.0).to(tl.float32) * LOG2_E
    return tl.maximum(g, LOG2_RESET)


@triton.jit
def sums(is_summed, x, EXACT: tl.constexpr):
    """Of each row of `is_summed`, (rows, tokens), the sum of the tokens of x that it marks."""
    marks = tl.where(is_summed, 1.0, 0.0)
    if EXACT == "bf16x3":
        # Two parts of x are as good as three products here, since marks are exact in bfloat16.
        high = x.to(tl.bfloat16)
        low = (x - high.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(marks.to(tl.bfloat16), low, tl.dot(marks.to(tl.bfloat16), high))
    else:  # noqa: RET505
        return tl.dot(marks, x, input_precision=EXACT)


@triton.jit
def _decay_over(is_summed, g, CHANNELS: tl.constexpr, EXACT: tl.constexpr):
    if CHANNELS:
        return exp2_flushed(sums(is_summed, g, EXACT))
    else:  # noqa: RET505
        return exp2_flushed(tl.sum(tl.where(is_summed, g[None, :], 0.0), axis=1))[:, None]


@triton.jit
def from_start(g, c, CHANNELS: tl.constexpr, EXACT: tl.constexpr):
    """Decay from the start of the chunk to each token, its own gate included, as a column."""
    return _decay_over(c[None, :] <= c[:, None], g, CHANNELS, EXACT)


@triton.jit
def to_end(g, c, CHANNELS: tl.constexpr, EXACT: tl.constexpr):
    """Decay from after each token to the end of the chunk, as a column."""
    return _decay_over(c[None, :] > c[:, None], g, CHANNELS, EXACT)


@triton.jit
def over_chunk(g):
    """Decay over the whole chunk, for each key channel or for all."""
    return exp2_flushed(tl.sum(g, axis=0))


@triton.jit
def is_in_half(c, level):
    """(BLOCK_C, BLOCK_C): whether two tokens are in one block of 2^level."""
    return (c >> level)[:, None] == (c >> level)[None, :]


@triton.jit
def pairs_of_halves(c, level):
    """Of the pairs (t, i) those in the second and in the first half of one block of 2^(level+1)."""
    half = (c >> level) & 1
    return is_in_half(c, level + 1) & (half == 1)[:, None] & (half == 0)[None, :]


@triton.jit
def halves_at(g, c, level, EXACT: tl.constexpr):
    """Decays from the start of a half to each of its tokens, and from the token to its end."""
    is_own, t, i = is_in_half(c, level), c[:, None], c[None, :]
    later, earlier = sums(is_own & (i <= t), g, EXACT), sums(is_own & (i > t), g, EXACT)
    return exp2_flushed(later), exp2_flushed(earlier)


@triton.jit
def decay_between(g, c):
    """(BLOCK_C, BLOCK_C): from after token i to token t, its own gate included; 0 where i > t."""
    t, i = c[:, None], c[None, :]
    logs = tl.cumsum(tl.where(t > i, g[:, None], 0.0), axis=0)
    return tl.where(i <= t, exp2_flushed(logs), 0.0)


@triton.jit
def inverse_of_unit_lower(a, c, LEVELS: tl.constexpr, EXACT: tl.constexpr):
    """(I + a)^-1 of a strictly lower triangular a, blocks merged by (16) from size 1 on."""
    # Of pairs of tokens it is known.
    inverse = tl.where(c[:, None] == c[None, :], 1.0, 0.0)
    inverse -= tl.where(pairs_of_halves(c, 0), a, 0.0)
    # A loop at run time: unrolled, its products would spill registers.
    for level in range(1, LEVELS):
        below = tl.where(pairs_of_halves(c, level), a, 0.0)
        merged = tl.dot(below, inverse, input_precision=EXACT)
        inverse -= tl.dot(inverse, merged, input_precision=EXACT)
    return inverse
