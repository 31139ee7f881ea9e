"""The rows and chunks of a call that are processed together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

# Tokens of all heads that are processed together. In the backward pass about 20 numbers for each of
# them and each unit of K exist at a time, more than second-level caches hold; with fewer tokens,
# starting the operations costs more than the caches save.
_GROUP_TOKENS = 2048


def group_tokens(chunk_size: int, heads: int) -> int:
    """Tokens of a row in a group of chunks."""
    return chunk_size * max(1, _GROUP_TOKENS // (chunk_size * heads))


def num_kept(T: int, chunk_size: int, heads: int, documents: int | None) -> int:
    """Groups of a row; an upper bound for packed documents, which needs no lengths."""
    tokens = group_tokens(chunk_size, heads)
    return -(-T // tokens) if documents is None else T // tokens + documents


@dataclass(frozen=True)
class Group:
    """Some consecutive chunks of some rows. The last chunk may lack tokens."""

    rows: slice  # of the batch
    start: int
    end: int
    chunks: int  # M
    chunk_size: int  # C
    kept: int  # number of the group among those of its rows

    def load(self, x: Tensor, dtype: torch.dtype, heads: int) -> Tensor:
        """(B, T, G, D) as (chunks × rows × heads, C, D), with zeros after the last token."""
        x = x[self.rows, self.start : self.end].to(dtype)
        if missing := self.chunks * self.chunk_size - x.shape[1]:
            x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, missing))
        x = x.unflatten(1, (self.chunks, self.chunk_size)).permute(1, 0, 3, 2, 4)
        if x.shape[2] != heads:
            x = x.repeat_interleave(heads // x.shape[2], dim=2)
        return x.reshape(-1, *x.shape[3:])

    def store(self, x: Tensor, into: Tensor) -> None:
        """The inverse of `load`, where heads that shared a head of `into` are added up."""
        into = into[self.rows, self.start : self.end]
        B, tokens, G, D = into.shape
        x = x.view(self.chunks, B, G, -1, self.chunk_size, D)
        x = x[:, :, :, 0] if x.shape[3] == 1 else x.sum(dim=3)
        into.copy_(x.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :tokens])


@dataclass(frozen=True)
class Sequences:
    """Rows of the batch that run together, or one packed document."""

    rows: slice
    states: slice
    groups: tuple[Group, ...]


def sequences(
    B: int, T: int, heads: int, chunk_size: int, cu_seqlens: Tensor | None
) -> Iterator[Sequences]:
    """All rows or documents of a call. Short rows run together."""
    if cu_seqlens is None:
        padded = -(-T // chunk_size) * chunk_size
        together = max(1, _GROUP_TOKENS // (padded * heads))
        for first in range(0, B, together):
            rows = slice(first, min(first + together, B))
            yield Sequences(rows, rows, _groups(rows, 0, T, heads, chunk_size, kept=0))
        return
    kept = 0
    for n, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        groups = _groups(slice(0, 1), start, end, heads, chunk_size, kept=kept)
        yield Sequences(slice(0, 1), slice(n, n + 1), groups)
        kept += len(groups)


def _groups(
    rows: slice, start: int, end: int, heads: int, chunk_size: int, *, kept: int
) -> tuple[Group, ...]:
    tokens = group_tokens(chunk_size, heads)
    return tuple(
        Group(
            rows, first, min(first + tokens, end),
            chunks=-(-(min(first + tokens, end) - first) // chunk_size),
            chunk_size=chunk_size,
            kept=kept + n,
        )
        for n, first in enumerate(range(start, end, tokens))
    )  # fmt: skip
