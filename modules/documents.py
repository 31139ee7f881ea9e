"""Scans along time that begin anew at every document."""

from collections.abc import Callable
from itertools import pairwise

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from longhaul.kernels.power.checks import check_offsets, check_packing


class Documents:
    """The documents of a call: rows of a batch, or rows packed along T with B = 1.

    There are N of them. What a document carries over from an earlier call has N rows, in order.
    """

    def __init__(
        self,
        x: Float[Tensor, "B T *rest"],
        cu_seqlens: Int[Tensor, "documents_plus_1"] | None = None,
    ) -> None:
        """Raises ValueError where cu_seqlens are no offsets from 0 to T, or B is not 1."""
        self.T = x.shape[1]
        self.device = x.device
        self.lengths: list[int] | None = None
        self.count = x.shape[0]
        if cu_seqlens is None:
            return
        check_packing(cu_seqlens, x)
        offsets = check_offsets(cu_seqlens, self.T)
        self.lengths = [end - start for start, end in pairwise(offsets)]
        self.count = len(self.lengths)

    def split(self, x: Float[Tensor, "B T *rest"]) -> list[Tensor]:
        """One tensor a document where they are packed, else x itself."""
        return [x] if self.lengths is None else list(x.split(self.lengths, dim=1))

    def cumsum(
        self, x: Float[Tensor, "B T *rest"], start: Float[Tensor, "N *rest"]
    ) -> Float[Tensor, "B T *rest"]:
        """start + x_1 + ... + x_t."""
        return self._scan(lambda part, before: part.cumsum(dim=1) + before[:, None], x, start)

    def logcumsumexp(
        self, x: Float[Tensor, "B T *rest"], start: Float[Tensor, "N *rest"]
    ) -> Float[Tensor, "B T *rest"]:
        """log(exp(start) + exp(x_1) + ... + exp(x_t)); start may be -inf, a sum of nothing."""
        return self._scan(
            lambda part, before: torch.cat([before[:, None], part], 1).logcumsumexp(dim=1)[:, 1:],
            x,
            start,
        )

    def previous(
        self, x: Float[Tensor, "B T *rest"], start: Float[Tensor, "N *rest"]
    ) -> Float[Tensor, "B T *rest"]:
        """x_(t - 1), and start where a document begins."""
        return self._scan(
            lambda part, before: torch.cat([before[:, None], part[:, :-1]], 1), x, start
        )

    def positions(self, start: Float64[Tensor, "N"]) -> Float64[Tensor, "B T"]:
        """start + 1, start + 2, ..., in tokens."""
        rows = 1 if self.lengths is not None else self.count
        ones = torch.ones(rows, self.T, dtype=torch.float64, device=self.device)
        return self.cumsum(ones, start)

    def last(self, x: Float[Tensor, "B T *rest"]) -> Float[Tensor, "N *rest"]:
        """The value at every document's last token."""
        return torch.cat([part[:, -1] for part in self.split(x)])

    def _scan(self, one: Callable[[Tensor, Tensor], Tensor], x: Tensor, start: Tensor) -> Tensor:
        if self.lengths is None:
            return one(x, start)
        parts = zip(self.split(x), start.split(1), strict=True)
        return torch.cat([one(part, before) for part, before in parts], dim=1)
