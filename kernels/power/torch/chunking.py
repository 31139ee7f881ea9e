"""Splitting a call into blocks of rows and chunks of tokens, and the decays of its chunks."""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from longhaul.kernels.power.call import PowerCall
from longhaul.kernels.power.state import scales_rows
from longhaul.kernels.power.torch.attention import exp2_flushed_, queries_per_block
from longhaul.kernels.shapes import state_features

# A log2 gate is clamped to this. exp2_flushed_ turns 2^−192 into 0, so the gate is still a full
# reset. Differences of float64 sums of such terms are exact enough, while (−inf) − (−inf) is NaN.
_LOG2_RESET = -192.0
# Features exist for this many tokens at a time; longer chunks are processed in pieces. At K = 64
# those of a row then take 1.2 MB, about the second-level cache of a core.
FEATURE_TOKENS = 128
# Bytes that the features and scores of a block of rows may take. This exceeds second-level caches,
# but with smaller blocks starting operations costs more than the caches save. On a core of an EPYC,
# 8 MB took a few per cent less time than 12 or 16 at K = 64.
_BLOCK_BYTES = 8 << 20


class Chunk(NamedTuple):
    """Chunk `number`, the tokens from start to end."""

    number: int
    start: int
    end: int


class Rows(NamedTuple):
    """A block of rows: a range of batch entries and a range of heads."""

    batch: slice
    heads: slice

    def at(self, chunk: Chunk) -> tuple[slice, slice, slice]:
        """Index of the block's tokens in a tensor (B, T, heads, …)."""
        return self.batch, slice(chunk.start, chunk.end), self.heads

    def query_heads(self, rep: int, R: int) -> Rows:
        """The rep-th of the R query heads of every key head of the block."""
        first, last = self.heads.start, self.heads.stop - 1
        return Rows(self.batch, slice(first * R + rep, last * R + rep + 1, R))


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Sizes and settings of one call without packing."""

    B: int
    T: int
    H: int
    G: int
    K: int
    V: int
    degree: int
    scale: float
    normalize: bool
    chunk_size: int
    output_final_state: bool

    @classmethod
    def of(cls, call: PowerCall, q: Tensor, v: Tensor) -> Problem:
        """From q (B, T, H, K) and v (…, G, V). The attention form is a single chunk."""
        B, T, H, K = q.shape
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
            chunk_size=T if call.form == "attention" else min(call.chunk_size, T),
            output_final_state=call.output_final_state,
        )

    @property
    def R(self) -> int:
        """Query heads per key head."""
        return self.H // self.G

    @property
    def scales_rows(self) -> bool:
        """Whether each query's scores are divided by a unit of its own."""
        return scales_rows(self.degree, self.normalize)

    @property
    def P(self) -> int:
        """Number of features as stored."""
        return state_features(self.K, self.degree)

    @property
    def chunks(self) -> list[Chunk]:
        """All chunks in order. The last may be shorter."""
        starts = range(0, self.T, self.chunk_size)
        return [Chunk(n, t, min(t + self.chunk_size, self.T)) for n, t in enumerate(starts)]

    @property
    def rows_per_block(self) -> tuple[int, int]:
        """Batch entries and key heads of a block: the most rows that fit in _BLOCK_BYTES.

        At least two rows where the sizes allow, so that each of two cores has its own row.
        """
        C = self.chunk_size
        bytes_per_row = 8 * C * queries_per_block(C) + 16 * C * (self.K + self.V)
        if C < self.T:
            bytes_per_row += 4 * self.P * (min(C, FEATURE_TOKENS) + self.V)
        shapes = [(1, heads) for heads in range(1, self.G + 1) if self.G % heads == 0]
        shapes += [(batch, self.G) for batch in range(2, self.B + 1) if self.B % batch == 0]
        return [(b, g) for b, g in shapes if b * g <= 2 or b * g * bytes_per_row <= _BLOCK_BYTES][
            -1
        ]

    @property
    def row_blocks(self) -> list[Rows]:
        """All blocks of rows."""
        batch, heads = self.rows_per_block
        return [
            Rows(slice(b, b + batch), slice(g, g + heads))
            for b in range(0, self.B, batch)
            for g in range(0, self.G, heads)
        ]


class Decay(NamedTuple):
    """Running sums of log2 γ in every chunk, and the decays of eq. (3). None means no gates."""

    log_decay: Tensor | None = None  # (B, G, N, C) float64, from the start of the chunk
    from_start: Tensor | None = None  # (B, G, N, C) decay from the start of the chunk to a token
    to_end: Tensor | None = None  # (B, G, N, C) decay from a token to the end of the chunk

    @classmethod
    def of(cls, log_g: Tensor | None, problem: Problem, dtype: torch.dtype) -> Decay:
        """From log gates. Sums are float64: float32 would lose small decays next to a reset."""
        if log_g is None:
            return cls()
        C = problem.chunk_size
        # Padded tokens have gates of 1, so the last column is the total of the chunk.
        padding = -problem.T % C
        log2_g = (log_g.detach().double() / log(2)).clamp_(min=_LOG2_RESET)
        log2_g = torch.nn.functional.pad(log2_g.permute(0, 2, 1), (0, padding))
        log_decay = rearrange(log2_g, "b g (n c) -> b g n c", c=C).cumsum(dim=3)  # (B, G, N, C)
        from_start = exp2_flushed_(log_decay.to(dtype, copy=True))
        to_end = exp2_flushed_((log_decay[..., -1:] - log_decay).to(dtype))
        return cls(log_decay, from_start, to_end)

    def take(self, rows: Rows, chunk: Chunk) -> Decay:
        """The decays of one block of rows and one chunk: (rows, 1, tokens)."""
        if self.log_decay is None:
            return self
        tokens = chunk.end - chunk.start
        parts = (x[rows.batch, rows.heads, chunk.number, :tokens] for x in self if x is not None)
        return Decay(*(part.reshape(-1, 1, tokens) for part in parts))

    @property
    def total(self) -> Tensor | None:
        """Decay over the whole chunk, (rows, 1, 1)."""
        return None if self.from_start is None else self.from_start[:, :, -1:]
