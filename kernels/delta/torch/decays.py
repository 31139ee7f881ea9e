"""Decays between the tokens of a chunk, and products of queries and keys that fade by them.

Logs of decays are sums of log gates, built in a tree: at size s the two halves of every block of
2 s tokens have sums from the middle to each later token, and from each earlier token to the middle.
Sums are only ever added, README.md, section 3: so a gate of 0, whose log is −inf, needs no special
case, no factor exceeds 1, and nothing on the other side of such a gate leaves a rounding error.
"""

from __future__ import annotations

from math import log
from typing import NamedTuple

import torch
from torch import Tensor

from longhaul.kernels.common.decays import exp2_flushed_


class Halves(NamedTuple):
    """One level of the tree, with tensors (X, blocks, s, D)."""

    size: int  # s, tokens of half a block
    later: Tensor  # of the tokens of second halves: from the middle to the token
    earlier: Tensor  # of the tokens of first halves: from the token to the middle


class Tree:
    """Sums of gates (X, C, D), and the gradient of the gates from those of the sums."""

    def __init__(self, gates: Tensor) -> None:
        self.levels: list[Halves] = []
        self.from_start, self.to_end = gates.clone(), torch.zeros_like(gates)
        size = 1
        while size < gates.shape[1]:
            start, end = (_in_halves(x, size) for x in (self.from_start, self.to_end))
            self.levels.append(Halves(size, start[:, :, 1].clone(), end[:, :, 0].clone()))
            second = start[:, :, 1, -1:].clone()
            start[:, :, 1] += start[:, :, 0, -1:]
            end[:, :, 0] += second
            size *= 2

    @staticmethod
    def gradient(levels: list[Halves], from_start: Tensor, to_end: Tensor) -> Tensor:
        """Gradient of the gates from those of the sums; the last two are spent.

        There are no levels where no scores of pairs were used.
        """
        size = from_start.shape[1] // 2
        while size:
            start, end = (_in_halves(x, size) for x in (from_start, to_end))
            start[:, :, 0, -1] += start[:, :, 1].sum(dim=2)
            start[:, :, 1, -1] += end[:, :, 0].sum(dim=2)
            if levels:
                _, later, earlier = levels.pop()
                start[:, :, 1] += later
                end[:, :, 0] += earlier
            size //= 2
        return from_start


class ScalarDecays:
    """One gate per token: decays are factors of the scores, eq. (3)."""

    def __init__(self, log_g: Tensor) -> None:
        """From log gates (X, C, 1)."""
        X, C, _ = log_g.shape
        tree = Tree(log_g * (1 / log(2)))
        between = log_g.new_full((X, C, C), -torch.inf)
        between.diagonal(dim1=1, dim2=2).zero_()
        for size, later, earlier in tree.levels:
            torch.add(later, earlier.mT, out=_lower_left(between, size))
        self._sizes = [level.size for level in tree.levels]
        self._between = exp2_flushed_(between)
        self._gradient: Tensor | None = None  # of the logs of the decays between tokens
        self.from_start = exp2_flushed_(tree.from_start)
        self.to_end = exp2_flushed_(tree.to_end)
        self.total = self.from_start[:, -1:].clone()  # (X, 1, 1)

    def scores(self, x: Tensor, k: Tensor) -> Tensor:
        """x_t·k_i e^{G_t − G_i} for i ≤ t, else 0."""
        return torch.bmm(x, k.mT).mul_(self._between)

    def scores_backward(
        self, gradient: Tensor, x: Tensor, k: Tensor, scores: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Gradients of x and k. That of the gates is kept until `gate_gradient`."""
        weighted = gradient * scores
        self._gradient = weighted if self._gradient is None else self._gradient.add_(weighted)
        faded = gradient * self._between
        return torch.bmm(faded, k), torch.bmm(faded.mT, x)

    def gate_gradient(self, from_start: Tensor, to_end: Tensor, total: Tensor) -> Tensor:
        """Gradient of log_g, from those of the logs of the decays.

        Args:
            from_start, to_end: (X, C, K), one part for each key channel.
            total: (X, 1, K).
        """
        start, end = (x.sum(dim=2, keepdim=True) for x in (from_start, to_end))
        start[:, -1:] += total.sum(dim=2, keepdim=True)
        levels = []
        if self._gradient is not None:
            for size in self._sizes:
                pairs = _lower_left(self._gradient, size)
                earlier = pairs.sum(dim=2)[..., None]
                levels.append(Halves(size, pairs.sum(dim=3, keepdim=True), earlier))
        return Tree.gradient(levels, start, end)


class ChannelDecays:
    """A gate per token and key channel: decays are factors of queries and keys, eq. (4)."""

    def __init__(self, log_g: Tensor) -> None:
        """From log gates (X, C, K)."""
        tree = Tree(log_g * (1 / log(2)))
        self._levels = [
            Halves(size, exp2_flushed_(later), exp2_flushed_(earlier))
            for size, later, earlier in tree.levels
        ]
        self._gradients: list[Halves] = []
        self.from_start = exp2_flushed_(tree.from_start)
        self.to_end = exp2_flushed_(tree.to_end)
        self.total = self.from_start[:, -1:].clone()  # (X, 1, K)

    def scores(self, x: Tensor, k: Tensor) -> Tensor:
        """Σ_c x_tc k_ic e^{G_tc − G_ic} for i ≤ t, else 0."""
        X, C, _ = x.shape
        scores = x.new_zeros(X, C, C)
        scores.diagonal(dim1=1, dim2=2).copy_((x * k).sum(dim=2))
        for size, later, earlier in self._levels:
            rows = _in_halves(x, size)[:, :, 1] * later
            columns = _in_halves(k, size)[:, :, 0] * earlier
            _lower_left(scores, size).copy_(rows @ columns.mT)
        return scores

    def scores_backward(
        self, gradient: Tensor, x: Tensor, k: Tensor, scores: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Gradients of x and k. That of the gates is kept until `gate_gradient`."""
        own = gradient.diagonal(dim1=1, dim2=2)[..., None]
        dx, dk = own * k, own * x
        gradients = []
        for size, later, earlier in self._levels:
            pairs = _lower_left(gradient, size)
            x_later = _in_halves(x, size)[:, :, 1]
            k_earlier = _in_halves(k, size)[:, :, 0]
            rows = (pairs @ (k_earlier * earlier)).mul_(later)
            columns = (pairs.mT @ (x_later * later)).mul_(earlier)
            _in_halves(dx, size)[:, :, 1] += rows
            _in_halves(dk, size)[:, :, 0] += columns
            gradients.append(Halves(size, rows.mul_(x_later), columns.mul_(k_earlier)))
        for old, new in zip(self._gradients, gradients, strict=False):
            new.later.add_(old.later)
            new.earlier.add_(old.earlier)
        self._gradients = gradients
        return dx, dk

    def gate_gradient(self, from_start: Tensor, to_end: Tensor, total: Tensor) -> Tensor:
        """Gradient of log_g, from those of the logs of the decays; shapes as they have."""
        from_start[:, -1:] += total
        return Tree.gradient(self._gradients, from_start, to_end)


def _in_halves(x: Tensor, size: int) -> Tensor:
    """(X, C, D) as (X, blocks, 2 halves, tokens of a half, D), a view."""
    return x.unflatten(1, (-1, 2, size))  # type: ignore[no-any-return]


def _lower_left(x: Tensor, size: int) -> Tensor:
    """Pairs of the two halves of every block: (X, C, C) as (X, blocks, later, earlier), a view."""
    X, C, _ = x.shape
    blocks = x.view(X, C // (2 * size), 2 * size, C // (2 * size), 2 * size)
    return blocks.diagonal(dim1=1, dim2=3).movedim(-1, 1)[:, :, size:, :size]
