"""Scans along time that begin anew at every document, over one part of a sequence or all of it."""

from bisect import bisect_left, bisect_right
from functools import lru_cache
from itertools import accumulate, pairwise

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from longhaul.kernels.power.checks import check_offsets, check_packing
from longhaul.modules.sequence_parts import SequenceParts


class Documents:
    """The documents of a call: rows of a batch, or rows packed along T with B = 1.

    There are N of them. What a document carries over from an earlier call has N rows, in order.

    Where x is one part of a sequence, N counts the documents that have tokens in it. The first may
    have begun in an earlier part; its scans go on from there, so that every value is that of the
    whole sequence.
    """

    def __init__(
        self,
        x: Float[Tensor, "B T *rest"],
        cu_seqlens: Int[Tensor, "documents_plus_1"] | None = None,
        parts: SequenceParts | None = None,
    ) -> None:
        """cu_seqlens and T are those of the whole sequence, count times as long as x.

        Raises ValueError where cu_seqlens are no offsets from 0 to T, or B is not 1.
        """
        index, count = (0, 1) if parts is None else (parts.index, parts.count)
        self.parts = parts
        self.device = x.device
        self.num_tokens = x.shape[1]
        self.T = count * self.num_tokens
        self.rows = self.count = x.shape[0]
        self.lengths: list[int] | None = None
        start = index * self.num_tokens
        begin = 0
        if cu_seqlens is not None:
            check_packing(cu_seqlens, x)
            offsets = check_offsets(cu_seqlens, self.T)
            if parts is not None:
                begin = offsets[bisect_right(offsets, start) - 1]
                offsets = _within(offsets, start, start + self.num_tokens)
            self.lengths = [after - before for before, after in pairwise(offsets)]
            self.count = len(self.lengths)
        # Of the first document: its tokens in earlier parts, and the parts that they are in.
        self.tokens_before = start - begin
        self._parts_before = slice(begin // self.num_tokens, index)

    def split(self, x: Float[Tensor, "B T *rest"]) -> list[Tensor]:
        """One tensor a document where they are packed, else x itself."""
        return [x] if self.lengths is None else list(x.split(self.lengths, dim=1))

    def last_document(self, x: Float[Tensor, "B T *rest"]) -> Float[Tensor, "B L *rest"]:
        """The last document's tokens in x, which a next part may go on from; every row's own."""
        return x if self.lengths is None else x[:, x.shape[1] - self.lengths[-1] :]

    def after_first(self) -> tuple[list[int], Int[Tensor, "documents"]]:
        """Tokens of the first packed document and of the others, and offsets of the others."""
        assert self.lengths is not None
        first, *others = self.lengths
        return [first, sum(others)], _as_tensor((0, *accumulate(others)), self.device)

    def gather_before(self, *totals: Float[Tensor, "rows *rest"]) -> tuple[Tensor, ...]:
        """What is known of parts' last documents, of the parts that hold the first one's past.

        (parts before, rows, *rest); empty where it begins in this part, and never detached: the
        graph must be the same in all parts, or their backward passes would not meet.
        """
        assert self.parts is not None
        return tuple(every[self._parts_before] for every in self.parts.gather(*totals))

    def carry_on(
        self, start: Float[Tensor, "N *rest"], first: Float[Tensor, "rows *rest"]
    ) -> Float[Tensor, "N *rest"]:
        """`start` with other values for the first document: its own, where it began earlier."""
        return torch.cat([first, start[self.rows :]])

    def cumsum(
        self, x: Float[Tensor, "B T *rest"], start: Float[Tensor, "N *rest"]
    ) -> Float[Tensor, "B T *rest"]:
        """start + x_1 + ... + x_t."""
        if self.parts is not None:
            (totals,) = self.gather_before(self.last_document(x).sum(dim=1))
            start = self.carry_on(start, start[: self.rows] + totals.sum(dim=0))
        return self._sums(x, start)

    def logcumsumexp(
        self, x: Float[Tensor, "B T *rest"], start: Float[Tensor, "N *rest"]
    ) -> tuple[Float[Tensor, "B T *rest"], Float[Tensor, "B T *rest"]]:
        """log(exp(start) + exp(x_1) + ... + exp(x_t)), and the same up to x_(t - 1).

        start may be -inf, a sum of nothing.
        """
        if self.parts is not None:
            (totals,) = self.gather_before(self.last_document(x).logsumexp(dim=1))
            every = torch.cat([start[None, : self.rows], totals])
            start = self.carry_on(start, every.logsumexp(dim=0))
        sums = [
            torch.cat([before[:, None], part], 1).logcumsumexp(dim=1)
            for part, before in self._with_start(x, start)
        ]
        total, before = ([one[:, at] for one in sums] for at in (slice(1, None), slice(-1)))
        return torch.cat(total, dim=1), torch.cat(before, dim=1)

    def positions(self, start: Float64[Tensor, "N"]) -> Float64[Tensor, "B T"]:
        """start + 1, start + 2, ..., in tokens."""
        if self.tokens_before:
            start = self.carry_on(start, start[: self.rows] + self.tokens_before)
        ones = torch.ones(self.rows, self.num_tokens, dtype=torch.float64, device=self.device)
        return self._sums(ones, start)

    def last(self, x: Float[Tensor, "B T *rest"]) -> Float[Tensor, "N *rest"]:
        """The value at every document's last token in x."""
        return torch.cat([part[:, -1] for part in self.split(x)])

    def _sums(self, x: Tensor, start: Tensor) -> Tensor:
        documents = self._with_start(x, start)
        return torch.cat([part.cumsum(dim=1) + before[:, None] for part, before in documents], 1)

    def _with_start(self, x: Tensor, start: Tensor) -> list[tuple[Tensor, Tensor]]:
        if self.lengths is None:
            return [(x, start)]
        return list(zip(self.split(x), start.split(1), strict=True))


def _within(offsets: tuple[int, ...], start: int, end: int) -> tuple[int, ...]:
    """Offsets of the documents in tokens start to end, counted from there."""
    inside = offsets[bisect_right(offsets, start) : bisect_left(offsets, end)]
    return 0, *(offset - start for offset in inside), end - start


@lru_cache(maxsize=8)
def _as_tensor(offsets: tuple[int, ...], device: torch.device) -> Tensor:
    """The same tensor for all layers, so that its values are read back from the device once."""
    with torch.inference_mode(False):  # or a later training step could not use it
        return torch.tensor(offsets, dtype=torch.int32, device=device)
