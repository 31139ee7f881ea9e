"""Causal power attention inside chunks: pairs of blocks of tokens, many pairs at a time.

With a single chunk this is the attention form. Tensors are (items, width, tokens): an item is one
block of tokens of one key head of one batch entry. Items are sorted by blocks, so all pairs of
blocks at the same distance are one slice of queries and one of keys. Tokens are innermost, as in
the features. The value tensors have a row of ones at index V, so that index V of every product
is the denominator.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from longhaul.kernels.power.state import unit_above
from longhaul.kernels.power.torch.chunking import Problem, exp2_flushed_

# Bytes of a tensor of scores, of which some exist at a time: what second-level caches can hold.
_SCORE_BYTES = 1 << 20


class Keys(NamedTuple):
    """Keys and values (items, K or V + 1, tokens) of the blocks of a segment."""

    k: Tensor
    v: Tensor
    log_decay: Tensor | None  # (items, 1, tokens) float64, from the start of the chunk


class Pairs(NamedTuple):
    """Slices of items: of queries, and of the keys that they meet."""

    queries: slice
    keys: slice
    # Where blocks meet themselves: decays (items, keys, queries), or without gates ones (keys,
    # queries), and 0 in the future.
    own: Tensor | None = None
    before: Tensor | None = None  # (items, 1, keys) decays from a key to the query's block
    after: Tensor | None = None  # (items, 1, queries) decays from there to the query


class InsideChunks:
    """Attention among the tokens of each chunk of a segment.

    Between blocks decays multiply values and sums, so that scores need only the power; within a
    block they multiply the weights.
    """

    @staticmethod
    def of(problem: Problem, rows: int, like: Tensor) -> InsideChunks:
        """For blocks of `rows` rows."""
        return (FadedScores if problem.fades_scores else InsideChunks)(problem, rows, like)

    def __init__(self, problem: Problem, rows: int, like: Tensor) -> None:
        self.degree, self._rows, self._like = problem.degree, rows, like
        self._root = problem.degree if problem.fades_scores else 1  # of the decays
        self._size = size = problem.block_size
        self._has_past = problem.blocks_per_chunk > 1
        at_once = max(_SCORE_BYTES // (size * size * like.element_size()), 2)
        self._at_once = min(at_once, rows * problem.blocks_at_once)
        self._V = problem.V
        # Adding −inf to a difference of logs makes the future 2^−inf = 0 before it can overflow.
        self._future = like.new_full((size, size), -torch.inf).tril_(-1)
        self._causal = like.new_ones(size, size).triu_()

    @cached_property
    def _scores(self) -> Tensor:
        """Memory for scores and their powers, and for their gradients."""
        return self._like.new_empty(3, self._at_once, self._size, self._size)

    @cached_property
    def _own_decays(self) -> tuple[Tensor, Tensor]:
        shape = (self._at_once, self._size, self._size)
        return self._like.new_empty(shape), self._like.new_empty(shape, dtype=torch.float64)

    @cached_property
    def _values(self) -> Tensor:
        """Memory for values that are products with decays, and for their gradients."""
        return self._like.new_empty(2, self._at_once, self._V + 1, self._size)

    def forward(self, q: Tensor, keys: Keys, num: Tensor) -> None:
        """Write numerators and denominators."""
        if self._has_past:
            num.zero_()
        for pairs in self._past(keys):
            v, weights = self._forward_operands(q, keys, pairs)
            num[pairs.queries].baddbmm_(v, weights)
        self._fade_sums(num, keys)
        for pairs in self._own(keys):
            v, weights = self._forward_operands(q, keys, pairs)
            num[pairs.queries].baddbmm_(v, weights, beta=int(self._has_past))

    def backward(
        self,
        q: Tensor,
        keys: Keys,
        dnum: Tensor,
        into: tuple[Tensor, Tensor, Tensor],
        *,
        adds: bool,
    ) -> None:
        """Write dq, and write or add to dk and dv; scores are recomputed. dnum is overwritten."""
        for pairs in self._own(keys):
            self._backward_pairs(q, keys, dnum, pairs, into, beta=(0, int(adds)))
        self._fade_sums(dnum, keys)
        for pairs in self._past(keys):
            self._backward_pairs(q, keys, dnum, pairs, into, beta=(1, 1))

    def _backward_pairs(
        self,
        q: Tensor,
        keys: Keys,
        dnum: Tensor,
        pairs: Pairs,
        into: tuple[Tensor, Tensor, Tensor],
        *,
        beta: tuple[int, int],
    ) -> None:
        dq, dk, dv = into
        q, dnum, k = q[pairs.queries], dnum[pairs.queries], keys.k[pairs.keys]
        weights, dscores, power = self._scores[:, : len(q)]
        torch.bmm(k.mT, q, out=weights)
        v = self._faded_values(keys, pairs)
        torch.bmm(v.mT, dnum, out=dscores)
        if pairs.own is not None:
            dscores.mul_(pairs.own)
        self._power_backward_(weights, dscores, power)
        if pairs.own is not None:
            weights.mul_(pairs.own)
        dq[pairs.queries].baddbmm_(k, dscores, beta=beta[0], alpha=self.degree)
        dk[pairs.keys].baddbmm_(q, dscores.mT, beta=beta[1], alpha=self.degree)
        if pairs.before is None:
            dv[pairs.keys].baddbmm_(dnum, weights.mT, beta=beta[1])
        else:
            faded = torch.bmm(dnum, weights.mT, out=self._values[1, : len(q)])
            dv[pairs.keys].addcmul_(faded, pairs.before)

    def _power_backward_(self, weights: Tensor, dscores: Tensor, power: Tensor) -> None:
        """Replace scores by their powers, and multiply dscores by the derivative divided by p."""
        if self.degree == 2:
            dscores.mul_(weights)
            weights.square_()
        elif self.degree > 2:
            # s^(p−1) rather than s^p / s: a score may be 0.
            torch.pow(weights, self.degree - 1, out=power)
            dscores.mul_(power)
            weights.mul_(power)

    def _forward_operands(self, q: Tensor, keys: Keys, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """The values, and their weights (items, keys, queries)."""
        q = q[pairs.queries]
        weights = torch.bmm(keys.k[pairs.keys].mT, q, out=self._scores[0, : len(q)])
        _power_(weights, self.degree)
        if pairs.own is not None:
            weights.mul_(pairs.own)
        return self._faded_values(keys, pairs), weights

    def _faded_values(self, keys: Keys, pairs: Pairs) -> Tensor:
        v = keys.v[pairs.keys]
        if pairs.before is None:
            return v
        return torch.mul(v, pairs.before, out=self._values[0, : len(v)])

    def _fade_sums(self, sums: Tensor, keys: Keys) -> None:
        """Multiply by the decay from the start of the block to each query."""
        if self._has_past and keys.log_decay is not None:
            sums.mul_(self._after(keys.log_decay))

    def _own(self, keys: Keys) -> Iterator[Pairs]:
        """Every block with itself."""
        for items in self._slices(len(keys.k)):
            own = self._causal
            if keys.log_decay is not None:
                decays, difference = (x[: items.stop - items.start] for x in self._own_decays)
                log_decay = keys.log_decay[items]
                torch.sub(log_decay, log_decay.mT, out=difference)
                own = exp2_flushed_(decays.copy_(difference).add_(self._future), self._root)
            yield Pairs(items, items, own)

    def _past(self, keys: Keys) -> Iterator[Pairs]:
        """Every block with every earlier block of its chunk; at most one chunk has such blocks.

        The two factors of a decay, from the key to the first token of the query's block and from
        there to the query, are ≤ 1, eq. (5): neither can overflow, and if one underflows so does
        the weight.
        """
        if not self._has_past:
            return
        for offset in range(self._rows, len(keys.k), self._rows):
            for at in self._slices(len(keys.k) - offset):
                queries = slice(at.start + offset, at.stop + offset)
                before = None
                if keys.log_decay is not None:
                    first = keys.log_decay[queries, :, :1]
                    difference = (first - keys.log_decay[at]).to(keys.k.dtype)
                    before = exp2_flushed_(difference, self._root)
                yield Pairs(queries, at, before=before)

    def _after(self, log_decay: Tensor) -> Tensor:
        difference = (log_decay - log_decay[..., :1]).to(self._like.dtype)
        return exp2_flushed_(difference, self._root)

    def _slices(self, count: int) -> Iterator[slice]:
        for start in range(0, count, self._at_once):
            yield slice(start, min(start + self._at_once, count))


class FadedScores(InsideChunks):
    """The same for degrees whose powers may leave the range of float32, eq. (17).

    Decays are roots that multiply the scores: a score in the future or before a reset is 0 before
    its power could be infinite. Where rows are normalised, backward passes take queries divided by
    den^(1/p), so that weights are those of the mean, and at most 1.
    """

    def find_units(self, q: Tensor, keys: Keys, unit: Tensor) -> None:
        """Write for each query (items, 1, tokens) a power of two above all its scores."""
        unit.zero_()
        for pairs in self._all(keys):
            scores = self._faded_scores(q, keys, pairs).abs_()
            part = unit[pairs.queries]
            torch.maximum(part, scores.amax(dim=1, keepdim=True), out=part)
        unit.copy_(unit_above(unit))

    def _all(self, keys: Keys) -> Iterator[Pairs]:
        yield from self._past(keys)
        yield from self._own(keys)

    def _past(self, keys: Keys) -> Iterator[Pairs]:
        after = None if keys.log_decay is None else self._after(keys.log_decay)
        for pairs in super()._past(keys):
            yield pairs._replace(after=None if after is None else after[pairs.queries])

    def _faded_scores(self, q: Tensor, keys: Keys, pairs: Pairs) -> Tensor:
        q = q[pairs.queries]
        scores = torch.bmm(keys.k[pairs.keys].mT, q, out=self._scores[0, : len(q)])
        return self._fade_(scores, pairs)

    def _fade_(self, scores: Tensor, pairs: Pairs) -> Tensor:
        if pairs.own is not None:
            scores.mul_(pairs.own)
        elif pairs.before is not None and pairs.after is not None:
            scores.mul_(pairs.before.mT).mul_(pairs.after)
        return scores

    def _forward_operands(self, q: Tensor, keys: Keys, pairs: Pairs) -> tuple[Tensor, Tensor]:
        weights = self._faded_scores(q, keys, pairs)
        _power_(weights, self.degree)
        return keys.v[pairs.keys], weights

    def _backward_pairs(
        self,
        q: Tensor,
        keys: Keys,
        dnum: Tensor,
        pairs: Pairs,
        into: tuple[Tensor, Tensor, Tensor],
        *,
        beta: tuple[int, int],
    ) -> None:
        dq, dk, dv = into
        weights = self._faded_scores(q, keys, pairs)
        q, dnum, k = q[pairs.queries], dnum[pairs.queries], keys.k[pairs.keys]
        _, dscores, power = self._scores[:, : len(q)]
        torch.bmm(keys.v[pairs.keys].mT, dnum, out=dscores)
        self._power_backward_(weights, dscores, power)
        self._fade_(dscores, pairs)
        dq[pairs.queries].baddbmm_(k, dscores, beta=beta[0], alpha=self.degree)
        dk[pairs.keys].baddbmm_(q, dscores.mT, beta=beta[1], alpha=self.degree)
        dv[pairs.keys].baddbmm_(dnum, weights.mT, beta=beta[1])

    def _fade_sums(self, sums: Tensor, keys: Keys) -> None:
        """Nothing is left to do: the scores are faded."""


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
