"""Causal power attention inside one chunk, one block of queries at a time.

With a single chunk this is the attention form. Tensors are (rows, width, tokens): a row is one
key head of one batch entry, and tokens are innermost, as in the features. The value tensors have
a row of ones at index V, so that index V of every product is the denominator.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from longhaul.kernels.power.state import unit_above
from longhaul.kernels.shapes import HIGHEST_UNSCALED_DEGREE

# Queries per block: few enough that scores stay in cache and few of them lie in the future.
_BLOCK = 128


def queries_per_block(tokens: int) -> int:
    """Queries of a chunk that are scored together."""
    return min(tokens, _BLOCK)


class Buffers(NamedTuple):
    """A chunk's tensors and their gradients: (rows, K or V + 1, tokens); unit (rows, 1, tokens)."""

    q: Tensor
    k: Tensor
    v: Tensor
    num: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dnum: Tensor
    unit: Tensor


class _Scratch:
    """Memory that the blocks of queries share, one after the other."""

    def __init__(self, buffers: Buffers) -> None:
        rows, width, tokens = buffers.v.shape
        size = queries_per_block(tokens)
        like = buffers.v
        self.scores = like.new_empty(3, rows * tokens * size)
        self.values = like.new_empty(rows, width, tokens)
        self.products = like.new_empty(rows * max(width, buffers.k.shape[1]) * tokens)
        self.dnum = like.new_empty(rows, width, size)
        self.log_pair = like.new_empty(rows, size, size, dtype=torch.float64)
        # Adding −inf to a difference of logs makes the future 2^−inf = 0 before it can overflow.
        self.future = torch.full_like(like[0, 0, :size].expand(size, size), -torch.inf).tril_(-1)
        self.causal = torch.ones_like(like[0, 0, :size]).expand(size, size).triu()


class _Block:
    """Queries from start to end of the chunk against all its keys before end, eq. (4)."""

    def __init__(
        self, buffers: Buffers, degree: int, start: int, end: int, scratch: _Scratch
    ) -> None:
        rows, size = buffers.v.shape[0], end - start
        self.degree = degree
        # The inner loops reuse the same memory many times, so every view is made once, here.
        self.has_past = start > 0
        self._products = scratch.products
        self.start, self.end = start, end
        shape = (rows, end, size)
        self.weights, self.dscores, self.power = scratch.scores[:, : rows * end * size].view(
            3, *shape
        )
        self.weights_own, self.dscores_own = self.weights[:, start:], self.dscores[:, start:]
        self.weights_past, self.dscores_past = self.weights[:, :start], self.dscores[:, :start]
        q, k, v, num, dq, dk, dv, dnum, unit = buffers
        self.q, self.num, self.dq, self.dnum = (x[:, :, start:end] for x in (q, num, dq, dnum))
        self.unit = unit[:, :, start:end]
        self.k, self.v, self.dk, self.dv = (x[:, :, :end] for x in (k, v, dk, dv))
        self.v_own, self.dv_own = v[:, :, start:end], dv[:, :, start:end]
        self.v_past, self.dv_past = v[:, :, :start], dv[:, :, :start]
        self.scaled_past = scratch.values[:, :, :start]
        self.scaled_dnum = scratch.dnum[:, :, :size]
        self.log_pair = scratch.log_pair[:, :size, :size]
        self.future = scratch.future[:size, :size]
        self.causal = scratch.causal[:size, :size]
        self.is_gated = False
        self.pair = v.new_empty(rows, size, size)
        self.before = v.new_empty(rows, 1, start)
        self.after = v.new_empty(rows, 1, size)

    def set_decay(self, log_decay: Tensor | None) -> None:
        """Set decays: a matrix between the block's own tokens, two factors for earlier keys.

        The two factors, from the key to the block's first token and from there to the query, are
        ≤ 1, eq. (5): neither can overflow, and if one underflows so does the weight.
        """
        self.is_gated = log_decay is not None
        if log_decay is None:
            return
        own = log_decay[:, :, self.start : self.end]  # (rows, 1, queries)
        torch.sub(own, own.transpose(1, 2), out=self.log_pair)
        exp2_flushed_(self.pair.copy_(self.log_pair).add_(self.future), self.root)
        if self.has_past:
            before = own[:, :, :1] - log_decay[:, :, : self.start]
            exp2_flushed_(self.before.copy_(before), self.root)
            exp2_flushed_(self.after.copy_(own - own[:, :, :1]), self.root)

    @property
    def root(self) -> int:
        """The root of the decays that is kept."""
        return 1

    def forward(self, finds_units: bool) -> None:
        """Write the block's numerators and denominators."""
        assert not finds_units
        torch.bmm(self.k.transpose(1, 2), self.q, out=self.weights)
        _power_(self.weights, self.degree)
        if not self.is_gated:
            self.weights_own.mul_(self.causal)
            torch.bmm(self.v, self.weights, out=self.num)
            return
        self.weights_own.mul_(self.pair)
        if not self.has_past:
            torch.bmm(self.v, self.weights, out=self.num)
            return
        torch.mul(self.v_past, self.before, out=self.scaled_past)
        torch.bmm(self.scaled_past, self.weights_past, out=self.num)
        self.num.mul_(self.after)
        self._add_product(self.num, self.v_own, self.weights_own)

    def backward(self) -> None:
        """Write the block's dq and add to dk and dv; scores are recomputed."""
        degree = self.degree
        dnum, v_past = self.dnum, self.v_past
        if self.is_gated and self.has_past:
            dnum = torch.mul(self.dnum, self.after, out=self.scaled_dnum)
            v_past = torch.mul(self.v_past, self.before, out=self.scaled_past)
        torch.bmm(self.k.transpose(1, 2), self.q, out=self.weights)
        torch.bmm(self.v_own.transpose(1, 2), self.dnum, out=self.dscores_own)
        if self.has_past:
            torch.bmm(v_past.transpose(1, 2), dnum, out=self.dscores_past)
        own_decay = self.pair if self.is_gated else self.causal
        self.dscores_own.mul_(own_decay)
        if degree == 2:
            self.dscores.mul_(self.weights)
            self.weights.square_()
        elif degree > 2:
            # s^(p−1) rather than s^p / s: a score may be 0.
            torch.pow(self.weights, degree - 1, out=self.power)
            self.dscores.mul_(self.power)
            self.weights.mul_(self.power)
        self.weights_own.mul_(own_decay)
        torch.bmm(self.k, self.dscores, out=self.dq)
        self.dq.mul_(degree)
        self._add_product(self.dk, self.q, self.dscores.transpose(1, 2), degree)
        self._add_product(self.dv_own, self.dnum, self.weights_own.transpose(1, 2))
        if not self.has_past:
            return
        if self.is_gated:
            torch.bmm(dnum, self.weights_past.transpose(1, 2), out=self.scaled_past)
            self.dv_past.addcmul_(self.scaled_past, self.before)
        else:
            self._add_product(self.dv_past, dnum, self.weights_past.transpose(1, 2))

    def _add_product(self, into: Tensor, a: Tensor, b: Tensor, times: int = 1) -> None:
        """into += times · a b. torch's baddbmm would process a slice of a buffer row by row."""
        shape = (a.shape[0], a.shape[1], b.shape[2])
        product = self._products[: a.shape[0] * a.shape[1] * b.shape[2]].view(shape)
        into.add_(torch.bmm(a, b, out=product), alpha=times)


class _ScaledBlock(_Block):
    """The same for degrees whose powers may leave the range of float32, eq. (17).

    Decays are roots that multiply the scores: a score in the future or before a reset is 0 before
    its power could be infinite. Backward passes take queries divided by den^(1/p), so that weights
    are those of the mean, and at most 1.
    """

    @property
    def root(self) -> int:
        return self.degree

    def forward(self, finds_units: bool) -> None:
        """Write numerators and denominators, in the units^p that it finds if it is told to."""
        self._score()
        if finds_units:
            largest = torch.abs(self.weights, out=self.power).amax(dim=1, keepdim=True)
            self.weights.div_(self.unit.copy_(unit_above(largest)))
        _power_(self.weights, self.degree)
        torch.bmm(self.v, self.weights, out=self.num)

    def backward(self) -> None:
        self._score()
        torch.bmm(self.v.transpose(1, 2), self.dnum, out=self.dscores)
        # s^(p−1) rather than s^p / s: a score may be 0.
        torch.pow(self.weights, self.degree - 1, out=self.power)
        self.dscores.mul_(self.power)
        self.weights.mul_(self.power)
        self._fade_(self.dscores)
        torch.bmm(self.k, self.dscores, out=self.dq)
        self.dq.mul_(self.degree)
        self._add_product(self.dk, self.q, self.dscores.transpose(1, 2), self.degree)
        self._add_product(self.dv, self.dnum, self.weights.transpose(1, 2))

    def _score(self) -> None:
        torch.bmm(self.k.transpose(1, 2), self.q, out=self.weights)
        self._fade_(self.weights)

    def _fade_(self, scores: Tensor) -> None:
        """Multiply (rows, keys, queries) by the roots of decays."""
        scores[:, self.start :].mul_(self.pair if self.is_gated else self.causal)
        if self.is_gated and self.has_past:
            scores[:, : self.start].mul_(self.before.transpose(1, 2)).mul_(self.after)


class InsideChunk:
    """Attention among the tokens of one chunk, reading and writing fixed buffers."""

    def __init__(self, buffers: Buffers, degree: int) -> None:
        tokens = buffers.v.shape[2]
        scratch = _Scratch(buffers)
        edges = [*range(0, tokens, queries_per_block(tokens)), tokens]
        block = _ScaledBlock if degree > HIGHEST_UNSCALED_DEGREE else _Block
        self._blocks = [block(buffers, degree, a, b, scratch) for a, b in pairwise(edges)]

    def set_decay(self, log_decay: Tensor | None) -> None:
        """Set the chunk's sums of log2 γ, (rows, 1, tokens) float64; None means no gates."""
        for block in self._blocks:
            block.set_decay(log_decay)

    def forward(self, *, finds_units: bool = False) -> None:
        """Write num from q, k and v; with finds_units also unit, in whose power p num then is."""
        for block in self._blocks:
            block.forward(finds_units)

    def backward(self) -> None:
        """Write dq, and add to dk and dv, from q, k, v and dnum."""
        for block in self._blocks:
            block.backward()


def log2_smallest(dtype: torch.dtype) -> float:
    """log2 of the smallest decay that is not flushed to 0."""
    return -160.0 if dtype == torch.float64 else -64.0


def exp2_flushed_(x: Tensor, root: int = 1) -> Tensor:
    """2^(x / root) in place, flushed to 0 where 2^x is far below the rounding of 1.

    Products with smaller decays would be denormal, which makes a matrix product ten times slower.
    exp2 is used because torch's vectorised exp is just as slow on −inf.
    """
    torch.threshold_(x, log2_smallest(x.dtype), -torch.inf)
    return (x if root == 1 else x.div_(root)).exp2_()


def _power_(x: Tensor, degree: int) -> None:
    """x^degree in place. torch computes squares and cubes by products; other powers are slow."""
    if degree == 1:
        return
    x.square_()
    while degree % 4 == 0:
        x.square_()
        degree //= 2
    if degree > 2:
        x.pow_(degree // 2)
