"""Splitting a call into blocks of rows, chunks and blocks of tokens; the decays of its chunks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import log
from typing import NamedTuple

import torch
from torch import Tensor

from longhaul.kernels.common.decays import exp2_flushed_
from longhaul.kernels.common.segments import sum_within, tokens_since
from longhaul.kernels.power.call import PowerCall
from longhaul.kernels.power.state import scales_rows
from longhaul.kernels.shapes import HIGHEST_UNSCALED_DEGREE, padded_width, state_features

# A log2 gate is clamped to this. exp2_flushed_ turns 2^−192 into 0, so the gate is still a full
# reset, while (−inf) − (−inf) is NaN.
_LOG2_RESET = -192.0
# Sums of log2 gates in chunks with resets after their first tokens are multiples of 2^−n, n by
# whether the decays are used in float64 or in less. So sums of both sides of a reset are added, and
# subtracted, without rounding errors, of which decays after the reset would have those of tokens
# before it: as long as the sums of a chunk are below 2^(53 − n).
_SUM_BITS = {True: 42, False: 30}
# Most tokens of a block, whose pairs are scored together and whose features exist together. At
# K = 64 the features of a row then take 1.2 MB, about the second-level cache of a core.
_BLOCK_TOKENS = 128
# About how many bytes the buffers of a block of rows may take: more than second-level caches hold.
# With smaller blocks, starting the operations costs more than the caches save.
_ROW_BLOCK_BYTES = 24 << 20
# Blocks whose tokens are loaded, scored, divided and stored together.
_BLOCKS_AT_ONCE = 8


class Segment(NamedTuple):
    """Chunks that are processed together: either one chunk, or several of one block each."""

    first: int  # number of the first chunk
    chunks: int
    start: int  # first token
    end: int  # the token after the last one
    blocks: int  # that the tokens take

    def blocks_of(self, chunk: int) -> range:
        """The blocks of one of the segment's chunks."""
        return range(self.blocks) if self.chunks == 1 else range(chunk, chunk + 1)


class Rows(NamedTuple):
    """A block of rows: a range of batch entries and a range of heads."""

    batch: slice
    heads: slice

    def query_heads(self, rep: int, R: int) -> Rows:
        """The rep-th of the R query heads of every key head of the block."""
        first, last = self.heads.start, self.heads.stop - 1
        return Rows(self.batch, slice(first * R + rep, last * R + rep + 1, R))


@dataclass(frozen=True, kw_only=True)
class CallSizes:
    """Sizes and settings of one call without packing.

    A chunk is `blocks_per_chunk` blocks of `block_size` tokens. All chunks are equally long, so
    that one set of buffers serves them all; the last tokens of the last one may be missing.
    """

    B: int
    T: int
    H: int
    G: int
    K: int
    V: int
    degree: int
    scale: float
    normalize: bool
    output_final_state: bool
    block_size: int
    blocks_per_chunk: int

    @classmethod
    def of(cls, call: PowerCall, q: Tensor, v: Tensor) -> CallSizes:
        """From q (B, T, H, K) and v (…, G, V). The attention form is a single chunk."""
        B, T, H, K = q.shape
        longest = T if call.form == "attention" else min(call.chunk_size, T)
        # As even as possible: with 129 tokens, two chunks of 65 instead of one of 128 and one of 1.
        chunk_size = _divide_up(T, _divide_up(T, longest))
        blocks_per_chunk = _divide_up(chunk_size, _BLOCK_TOKENS)
        return cls(
            B=B,
            T=T,
            H=H,
            G=v.shape[2],
            K=K,
            V=v.shape[3],
            degree=call.degree,
            scale=call.scale,
            normalize=call.normalize,
            output_final_state=call.output_final_state,
            block_size=_divide_up(chunk_size, blocks_per_chunk),
            blocks_per_chunk=blocks_per_chunk,
        )

    @property
    def R(self) -> int:
        """Query heads per key head."""
        return self.H // self.G

    @property
    def fades_scores(self) -> bool:
        """Whether decays multiply scores before the power, as p-th roots, and not its products."""
        return self.degree > HIGHEST_UNSCALED_DEGREE

    @property
    def scales_rows(self) -> bool:
        """Whether each query's scores are divided by a unit of its own."""
        return scales_rows(self.degree, self.normalize)

    @property
    def P(self) -> int:
        """Number of features as stored."""
        return state_features(self.K, self.degree)

    @property
    def chunk_size(self) -> int:
        """Tokens of a chunk, counting those that the last one may lack."""
        return self.block_size * self.blocks_per_chunk

    @property
    def num_chunks(self) -> int:
        return _divide_up(self.T, self.chunk_size)

    @property
    def chunks_at_once(self) -> int:
        """Chunks of a segment: several only if each is a single block.

        Above degree 4, a row's scale comes from its scores in the first chunk and from |q|
        afterwards, so these chunks are processed one at a time.
        """
        if self.blocks_per_chunk > 1 or self.scales_rows:
            return 1
        return min(_BLOCKS_AT_ONCE, self.num_chunks)

    @property
    def blocks_at_once(self) -> int:
        """Blocks of a segment."""
        return self.blocks_per_chunk * self.chunks_at_once

    @property
    def segments(self) -> list[Segment]:
        """All segments in order."""
        found = []
        for first in range(0, self.num_chunks, self.chunks_at_once):
            after = min(first + self.chunks_at_once, self.num_chunks)
            start, end = first * self.chunk_size, min(after * self.chunk_size, self.T)
            blocks = _divide_up(end - start, self.block_size)
            found.append(Segment(first, after - first, start, end, blocks))
        return found

    @cached_property
    def rows_per_block(self) -> tuple[int, int]:
        """Batch entries and key heads of a block: the most rows that fit in _ROW_BLOCK_BYTES.

        At least two rows where the sizes allow, so that each of two cores has its own row.
        """
        tokens = self.block_size * self.blocks_at_once
        width = padded_width(self.K, self.degree)
        bytes_per_row = 4 * tokens * ((2 + 2 * self.R) * width + (4 + 2 * self.R) * (self.V + 1))
        if self.num_chunks > 1:
            bytes_per_row += 4 * self.P * (self.block_size + 2 * self.V)
        shapes = [(1, heads) for heads in range(1, self.G + 1) if self.G % heads == 0]
        shapes += [(batch, self.G) for batch in range(2, self.B + 1) if self.B % batch == 0]
        return [
            (b, g) for b, g in shapes if b * g <= 2 or b * g * bytes_per_row <= _ROW_BLOCK_BYTES
        ][-1]

    @property
    def num_rows(self) -> int:
        """Rows of a block."""
        batch, heads = self.rows_per_block
        return batch * heads

    @property
    def row_blocks(self) -> list[Rows]:
        """All blocks of rows."""
        batch, heads = self.rows_per_block
        return [
            Rows(slice(b, b + batch), slice(g, g + heads))
            for b in range(0, self.B, batch)
            for g in range(0, self.G, heads)
        ]


def _divide_up(count: int, size: int) -> int:
    return -(-count // size)


def log2_sums(log_g: Tensor, problem: CallSizes, dtype: torch.dtype) -> Tensor:
    """Running sums of log2 γ from the start of every chunk, (chunks, B, G, tokens of a chunk).

    They are float64: float32 would lose small decays after a reset. Absent tokens have gates of 1,
    so the last sum is the total of the chunk. Decays follow from them in `dtype`.
    """
    B, T, G = log_g.shape
    log2_g = log_g.new_zeros(problem.num_chunks, problem.chunk_size, B, G, dtype=torch.float64)
    log2_g.flatten(0, 1)[:T] = log_g.detach().double().transpose(0, 1)
    # Not of gates that are merely small: sums before one would then depend on it.
    is_reset = log2_g.isneginf()
    log2_g.div_(log(2)).clamp_(min=_LOG2_RESET)
    # The first token of a chunk has nothing before it, which rounding errors could come from.
    if not log_g.is_meta and not is_reset[:, 1:].any():
        return log2_g.permute(0, 2, 3, 1).cumsum(dim=3)
    own = sum_within(log2_g.masked_fill(is_reset, 0), tokens_since(is_reset))
    unit = 2.0 ** _SUM_BITS[dtype == torch.float64]
    own.mul_(unit).round_().div_(unit)
    # At a reset everything before it in the chunk is added, and the reset.
    before = own.roll(1, dims=1)
    before[:, 0] = 0
    sums = own + torch.where(is_reset, before + _LOG2_RESET, 0).cumsum(dim=1)
    return sums.permute(0, 2, 3, 1)


class Decay(NamedTuple):
    """Running sums of log2 γ from the start of every chunk, and the decays of eq. (3)."""

    log_decay: Tensor  # (blocks of the segment, rows, 1, tokens of a block) float64
    from_start: Tensor  # the same shape: decay from the start of the chunk to a token
    to_end: Tensor  # the same shape: decay from a token to the end of the chunk
    total: Tensor  # (chunks, rows, 1, 1) decay over the whole chunk


class Decays:
    """The decays of all chunks of a call."""

    def __init__(self, log_g: Tensor, problem: CallSizes, dtype: torch.dtype) -> None:
        """From log gates (B, T, G)."""
        B, _, G = log_g.shape
        sums = log2_sums(log_g, problem, dtype)
        totals = sums[..., -1:]
        by_chunk = (
            sums,
            exp2_flushed_(sums.to(dtype, copy=True)),
            exp2_flushed_((totals - sums).to(dtype)),
        )
        shape = (problem.num_chunks, B, G, problem.blocks_per_chunk, problem.block_size)
        # (chunks, blocks of a chunk, B, G, tokens of a block)
        self._by_block = [x.view(shape).transpose(2, 3).transpose(1, 2) for x in by_chunk]
        self._totals = exp2_flushed_(totals.to(dtype, copy=True))

    def take(self, rows: Rows, segment: Segment) -> Decay:
        """The decays of one block of rows and one segment."""
        chunks = slice(segment.first, segment.first + segment.chunks)
        log_decay, from_start, to_end = (
            x[chunks, :, rows.batch, rows.heads].flatten(0, 1)[: segment.blocks].flatten(1, 2)
            for x in self._by_block
        )
        total = self._totals[chunks, rows.batch, rows.heads].flatten(1, 2)
        return Decay(
            log_decay[:, :, None], from_start[:, :, None], to_end[:, :, None], total[..., None]
        )
