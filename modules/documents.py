"""Cumulative sums along time that start again at every document.

They also work on one part of a sequence under context parallelism.
"""

from bisect import bisect_left, bisect_right
from functools import lru_cache
from itertools import accumulate, pairwise

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from longhaul.kernels.common.offsets import check_offsets, check_packing
from longhaul.modules.sequence_part import SequencePart


class Documents:
    """The documents in one call: the rows of a batch, or documents packed along T with B = 1.

    There are N of them. Tensors that a document carries over from an earlier call have N rows, in
    the same order.

    Where x is one part of a sequence, N counts the documents that have tokens in this part. The
    first of them may have begun in an earlier part. Its sums then continue from there, so every
    value equals that of the whole sequence.
    """

    def __init__(
        self,
        x: Float[Tensor, "B T *rest"],
        cu_seqlens: Int[Tensor, "documents_plus_1"] | None = None,
        sequence_part: SequencePart | None = None,
    ) -> None:
        """cu_seqlens and `self.T` refer to the whole sequence, which has `count` parts like x.

        Raises ValueError where cu_seqlens are not offsets from 0 to T, or B is not 1.
        """
        index, count = (
            (0, 1) if sequence_part is None else (sequence_part.index, sequence_part.count)
        )
        self.sequence_part = sequence_part
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
            if sequence_part is not None:
                begin = offsets[bisect_right(offsets, start) - 1]
                offsets = _offsets_within(offsets, start, start + self.num_tokens)
            self.lengths = [after - before for before, after in pairwise(offsets)]
            self.count = len(self.lengths)
        # The tokens that the first document has in earlier parts, and which parts those are.
        self.tokens_before = start - begin
        self._earlier_parts = slice(begin // self.num_tokens, index)

    def split(self, x: Float[Tensor, "B T *rest"]) -> list[Tensor]:
        """One tensor per document where documents are packed, else x itself."""
        return [x] if self.lengths is None else list(x.split(self.lengths, dim=1))

    def last_document(self, x: Float[Tensor, "B T *rest"]) -> Float[Tensor, "B L *rest"]:
        """The tokens of the last document in x (of every row), which the next part may continue."""
        return x if self.lengths is None else x[:, x.shape[1] - self.lengths[-1] :]

    def split_after_first(self) -> tuple[list[int], Int[Tensor, "documents"]]:
        """Tokens of the first packed document and of all others, and the offsets of the others."""
        assert self.lengths is not None
        first, *others = self.lengths
        return [first, sum(others)], _as_tensor((0, *accumulate(others)), self.device)

    def gather_earlier_parts(self, *totals: Float[Tensor, "rows ..."]) -> tuple[Tensor, ...]:
        """The `totals` of the earlier parts in which the first document of this part began.

        Every part gives totals over its last document. The result has the shape (earlier parts,
        rows, *rest), and is empty where the first document begins in this part. It is never
        detached: the graph must be the same on all ranks, or the collectives of their backward
        passes would not match.
        """
        assert self.sequence_part is not None
        return tuple(every[self._earlier_parts] for every in self.sequence_part.gather(*totals))

    def replace_first(
        self, start: Float[Tensor, "N *rest"], first: Float[Tensor, "rows *rest"]
    ) -> Float[Tensor, "N *rest"]:
        """`start` with the values of the first document (of every row) replaced by `first`."""
        return torch.cat([first, start[self.rows :]])

    def cumsum(
        self, x: Float[Tensor, "B T *rest"], start: Float[Tensor, "N *rest"]
    ) -> Float[Tensor, "B T *rest"]:
        """start + x_1 + ... + x_t."""
        if self.sequence_part is not None:
            (totals,) = self.gather_earlier_parts(self.last_document(x).sum(dim=1))
            start = self.replace_first(start, start[: self.rows] + totals.sum(dim=0))
        return self._sums(x, start)

    def logcumsumexp(
        self, x: Float[Tensor, "B T *rest"], start: Float[Tensor, "N *rest"]
    ) -> tuple[Float[Tensor, "B T *rest"], Float[Tensor, "B T *rest"]]:
        """log(exp(start) + exp(x_1) + ... + exp(x_t)), and the same up to x_(t - 1).

        start may be -inf, the log of an empty sum.
        """
        if self.sequence_part is not None:
            (totals,) = self.gather_earlier_parts(self.last_document(x).logsumexp(dim=1))
            every = torch.cat([start[None, : self.rows], totals])
            start = self.replace_first(start, every.logsumexp(dim=0))
        sums = [
            torch.cat([before[:, None], document], 1).logcumsumexp(dim=1)
            for document, before in self._with_start(x, start)
        ]
        total, before = ([one[:, at] for one in sums] for at in (slice(1, None), slice(-1)))
        return torch.cat(total, dim=1), torch.cat(before, dim=1)

    def positions(self, start: Float64[Tensor, "N"]) -> Float64[Tensor, "B T"]:
        """start + 1, start + 2, ..., in tokens."""
        if self.tokens_before:
            start = self.replace_first(start, start[: self.rows] + self.tokens_before)
        ones = torch.ones(self.rows, self.num_tokens, dtype=torch.float64, device=self.device)
        return self._sums(ones, start)

    def last(self, x: Float[Tensor, "B T *rest"]) -> Float[Tensor, "N *rest"]:
        """The value at the last token of every document in x."""
        return torch.cat([document[:, -1] for document in self.split(x)])

    def _sums(self, x: Tensor, start: Tensor) -> Tensor:
        documents = self._with_start(x, start)
        return torch.cat([one.cumsum(dim=1) + before[:, None] for one, before in documents], 1)

    def _with_start(self, x: Tensor, start: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Each document of x with its starting value."""
        if self.lengths is None:
            return [(x, start)]
        return list(zip(self.split(x), start.split(1), strict=True))


def _offsets_within(offsets: tuple[int, ...], start: int, end: int) -> tuple[int, ...]:
    """Offsets of the documents between tokens `start` and `end`, relative to `start`."""
    inside = offsets[bisect_right(offsets, start) : bisect_left(offsets, end)]
    return 0, *(offset - start for offset in inside), end - start


@lru_cache(maxsize=8)
def _as_tensor(offsets: tuple[int, ...], device: torch.device) -> Tensor:
    """Cached, so that all layers share one tensor and the device is synchronised only once."""
    with torch.inference_mode(False):  # an inference tensor could not be used in training later
        return torch.tensor(offsets, dtype=torch.int32, device=device)
