"""The documents of a batch, and sums along time that start again at every document.

All tensors have the shape of the batch, wherever documents begin in it. So one compiled graph
serves every batch, and nothing waits for the device. The sums also work on one part of a sequence
under context parallelism.
"""

import torch
from jaxtyping import Bool, Float, Float64, Int, Shaped
from torch import Tensor

from longhaul.kernels.common.offsets import check_offsets, check_packing
from longhaul.kernels.common.segments import sum_within, tokens_since
from longhaul.modules.sequence_part import SequencePart


def first_tokens(
    cu_seqlens: Int[Tensor, "documents_plus_1"], x: Shaped[Tensor, "B T *rest"], T: int
) -> Bool[Tensor, "1 T_whole"]:
    """Whether a token is the first of its document, from the offsets of documents packed into x.

    Where x is one part of a sequence, the offsets and T are those of the whole sequence. Offsets on
    a GPU are read once to check them, for which the host waits.

    Raises ValueError where cu_seqlens are not offsets from 0 to T, or B is not 1.
    """
    check_packing(cu_seqlens, x)
    check_offsets(cu_seqlens, T)
    is_first = torch.zeros(T, dtype=torch.bool, device=x.device)
    return is_first.index_fill_(0, cu_seqlens[:-1].long(), True)[None]


class Documents:
    """The documents in the rows of a batch. Every row begins a document, and may hold several."""

    age: Int[Tensor, "B T"] | None = None
    """Tokens of its own document before each token; None where every row is one document."""

    def __init__(
        self,
        x: Shaped[Tensor, "B T *rest"],
        is_first: Bool[Tensor, "B T_whole"] | None = None,
        sequence_part: SequencePart | None = None,
    ) -> None:
        """The documents of x.

        Args:
            x: tokens, or activations of tokens.
            is_first: whether a token is the first of its document. None: every row is a document.
            sequence_part: set where x is one of `count` parts of a sequence. is_first and `self.T`
                are those of the whole sequence; all else is of this part.

        Raises ValueError where is_first does not fit x.
        """
        self.sequence_part = sequence_part
        self.device = x.device
        self.rows, self.num_tokens = x.shape[:2]
        index, count = (
            (0, 1) if sequence_part is None else (sequence_part.index, sequence_part.count)
        )
        self.T = count * self.num_tokens
        self.tokens_before = index * self.num_tokens  # of this part
        if is_first is None:
            return
        for found, wanted in (
            (is_first.dtype, torch.bool),
            (tuple(is_first.shape), (self.rows, self.T)),
            (is_first.device, x.device),
        ):
            if found != wanted:
                raise ValueError(f"is_first: found {found}, wanted {wanted}")
        self.age = tokens_since(is_first)[:, self.tokens_before :][:, : self.num_tokens]

    @property
    def is_first(self) -> Bool[Tensor, "B T"] | None:
        """Whether a token is the first of its document; None where every row is one document."""
        return None if self.age is None else self.age == 0

    def begin_anew(self, log_g: Float[Tensor, "B T H"]) -> Float[Tensor, "B T H"]:
        """Log gates with a gate of zero at the first token of every document."""
        is_first = self.is_first
        return log_g if is_first is None else log_g.masked_fill(is_first[..., None], -torch.inf)

    def cumsum(
        self, x: Float[Tensor, "B T *rest"], start: Float[Tensor, "B *rest"]
    ) -> Float[Tensor, "B T *rest"]:
        """start + x_1 + ... + x_t over the document of every token.

        Where rows hold several documents, each begins with the `start` of its row. It takes
        log2(T) passes over x: differences of running sums would lose the digits of small sums.
        """
        if self.age is None:
            if self.sequence_part is not None:
                start = start + self._earlier(x.sum(dim=1), 0.0).sum(dim=0)
            return x.cumsum(dim=1) + start[:, None]
        sums = sum_within(x, self.age)
        before = start[:, None]
        if self.sequence_part is not None:
            carried = start + self._earlier(sums[:, -1], 0.0).sum(dim=0)
            before = torch.where(self._began_earlier(x), carried[:, None], before)
        return sums + before

    def logcumsumexp(
        self, x: Float[Tensor, "B T *rest"], start: Float[Tensor, "B *rest"]
    ) -> tuple[Float[Tensor, "B T *rest"], Float[Tensor, "B T *rest"]]:
        """log(exp(start) + exp(x_1) + ... + exp(x_t)), and the same up to x_(t - 1).

        start may be -inf, the log of an empty sum. Documents and cost are as in `cumsum`.
        """
        is_first = self.is_first
        sums = None if self.age is None else sum_within(x, self.age, torch.logaddexp)
        first = start  # the sum before the first token of this part
        if self.sequence_part is not None:
            total = x.logsumexp(dim=1) if sums is None else sums[:, -1]
            every = torch.cat([start[None], self._earlier(total, -torch.inf)])
            first = every.logsumexp(dim=0)
        if sums is None or is_first is None:
            total = torch.cat([first[:, None], x], dim=1).logcumsumexp(dim=1)
            return total[:, 1:], total[:, :-1]
        before = start[:, None]
        if self.sequence_part is not None:
            before = torch.where(self._began_earlier(x), first[:, None], before)
        total = torch.logaddexp(sums, before)
        previous = torch.cat([first[:, None], total[:, :-1]], dim=1)
        return total, torch.where(_over(is_first, x), start[:, None], previous)

    def positions(self, start: Float64[Tensor, "B"]) -> Float64[Tensor, "B T"]:
        """start + 1, start + 2, ..., in tokens, over every document."""
        age = self.age
        if age is None:
            age = torch.arange(self.num_tokens, device=self.device)[None] + self.tokens_before
        return (age + 1).double() + start[:, None]

    def last(self, x: Float[Tensor, "B T *rest"]) -> Float[Tensor, "B *rest"]:
        """The value at the last token of every row, which a state keeps."""
        return x[:, -1]

    def _began_earlier(self, x: Tensor) -> Tensor:
        """Whether the document of a token began in an earlier part, in a shape to go with x."""
        assert self.age is not None
        return _over(self.age > torch.arange(self.num_tokens, device=self.device), x)

    def _earlier(
        self, total: Float[Tensor, "B *rest"], nothing: float
    ) -> Float[Tensor, "parts B *rest"]:
        """The totals that each earlier part has of the document with which this part begins.

        Every part gives the total over its last document; it counts as `nothing` where this part
        begins another. It is never detached: the graph must be the same on all ranks, or the
        collectives of their backward passes would not match.
        """
        assert self.sequence_part is not None
        index = self.sequence_part.index
        (every,) = self.sequence_part.gather(total)
        every = every[:index]
        if self.age is None:
            return every
        # Tokens between the end of an earlier part and this part.
        between = self.num_tokens * torch.arange(index - 1, -1, -1, device=self.device)
        return torch.where(_over(self.age[:, 0] > between[:, None], every), every, nothing)


def _over(mask: Bool[Tensor, "N M"], x: Tensor) -> Bool[Tensor, "N M ..."]:
    """The mask with as many dimensions as x."""
    return mask.reshape(*mask.shape, *(1 for _ in range(x.ndim - 2)))
