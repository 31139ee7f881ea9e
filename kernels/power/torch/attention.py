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
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from longhaul.kernels.common.decays import exp2_flushed_
from longhaul.kernels.power.state import unit_above
from longhaul.kernels.power.torch.chunking import CallSizes
from longhaul.kernels.power.torch.compiled import attend, attend_backward, attends

# Bytes of a tensor of scores, of which some exist at a time: what second-level caches can hold.
_SCORE_BYTES = 1 << 20


class Keys(NamedTuple):
    """Keys and values (items, K or V + 1, tokens) of the blocks of a segment."""

    k: Tensor
    v: Tensor
    log_decay: Tensor | None  # (items, 1, tokens) float64, from the start of the chunk


class Pairs(NamedTuple):
    """Slices of items: of queries, and of the keys that they meet; and the decays between them.

    Each factor broadcasts to what it multiplies.
    """

    queries: slice
    keys: slice
    on_scores: tuple[Tensor, ...] = ()  # of (items, keys, queries), before the power
    on_weights: tuple[Tensor, ...] = ()  # of the same, after it
    on_values: Tensor | None = None  # of (items, V + 1, keys)


class InsideChunks:
    """Attention among the tokens of each chunk of a segment.

    Between blocks decays multiply values and sums, so that scores need only the power; within a
    block they multiply the weights. At degrees whose powers may leave the range of float32 decays
    are roots that multiply the scores instead, eq. (17): a score in the future or before a reset is
    0 before its power could be infinite. Where rows are normalised, backward passes then take
    queries divided by den^(1/p), so that weights are those of the mean, and at most 1.
    """

    def __init__(self, problem: CallSizes, like: Tensor) -> None:
        self.degree, self._V, self._like = problem.degree, problem.V, like
        self._fades_scores, self._rows = problem.fades_scores, problem.num_rows
        self._is_compiled = attends(problem.degree, like)
        self._root = problem.degree if problem.fades_scores else 1  # of the decays
        self._size = size = problem.block_size
        self._has_past = problem.blocks_per_chunk > 1
        at_once = max(_SCORE_BYTES // (size * size * like.element_size()), 2)
        self._at_once = min(at_once, self._rows * problem.blocks_at_once)

    @cached_property
    def _future(self) -> Tensor:
        """Adding −inf to a difference of logs makes the future 2^−inf = 0 before it overflows."""
        return self._like.new_full((self._size, self._size), -torch.inf).tril_(-1)

    @cached_property
    def _causal(self) -> Tensor:
        return self._like.new_ones(self._size, self._size).triu_()

    @cached_property
    def _memory(self) -> Tensor:
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

    def find_units(self, q: Tensor, keys: Keys, unit: Tensor) -> None:
        """Write for each query (items, 1, tokens) a power of two above all its faded scores."""
        unit.zero_()
        for pairs in chain(self._past(keys), self._own(keys)):
            part = unit[pairs.queries]
            largest = self._scores(q, keys, pairs).abs_().amax(dim=1, keepdim=True)
            torch.maximum(part, largest, out=part)
        unit.copy_(unit_above(unit))

    def forward(self, q: Tensor, keys: Keys, num: Tensor) -> None:
        """Write numerators and denominators."""
        if self._is_compiled:
            attend(q, *keys, num, self.degree, self._rows, self._has_past)
            return
        if self._has_past:
            num.zero_()
        for pairs in self._past(keys):
            self._forward_pairs(q, keys, num, pairs, beta=1)
        self._fade_sums(num, keys)
        for pairs in self._own(keys):
            self._forward_pairs(q, keys, num, pairs, beta=int(self._has_past))

    def backward(
        self,
        q: Tensor,
        keys: Keys,
        dnum: Tensor,
        into: tuple[Tensor, Tensor, Tensor],
        *,
        adds: bool,
    ) -> None:
        """Write dq, and write or add to dk and dv; scores are recomputed. dnum may be
        overwritten."""
        if self._is_compiled:
            sizes = self.degree, self._rows, self._has_past
            attend_backward(q, *keys, dnum, into, *sizes, adds=adds)
            return
        for pairs in self._own(keys):
            self._backward_pairs(q, keys, dnum, into, pairs, beta=(0, int(adds)))
        self._fade_sums(dnum, keys)
        for pairs in self._past(keys):
            self._backward_pairs(q, keys, dnum, into, pairs, beta=(1, 1))

    def _forward_pairs(self, q: Tensor, keys: Keys, num: Tensor, pairs: Pairs, beta: int) -> None:
        weights = self._scores(q, keys, pairs)
        _power_(weights, self.degree)
        _multiply_(weights, pairs.on_weights)
        num[pairs.queries].baddbmm_(self._faded_values(keys, pairs), weights, beta=beta)

    def _backward_pairs(
        self,
        q: Tensor,
        keys: Keys,
        dnum: Tensor,
        into: tuple[Tensor, Tensor, Tensor],
        pairs: Pairs,
        beta: tuple[int, int],
    ) -> None:
        dq, dk, dv = into
        weights = self._scores(q, keys, pairs)
        q, dnum, k = q[pairs.queries], dnum[pairs.queries], keys.k[pairs.keys]
        _, dscores, power = self._memory[:, : len(q)]
        torch.bmm(self._faded_values(keys, pairs).mT, dnum, out=dscores)
        _multiply_(dscores, pairs.on_weights)
        self._power_backward_(weights, dscores, power)
        _multiply_(dscores, pairs.on_scores)
        _multiply_(weights, pairs.on_weights)
        dq[pairs.queries].baddbmm_(k, dscores, beta=beta[0], alpha=self.degree)
        dk[pairs.keys].baddbmm_(q, dscores.mT, beta=beta[1], alpha=self.degree)
        if pairs.on_values is None:
            dv[pairs.keys].baddbmm_(dnum, weights.mT, beta=beta[1])
        else:
            faded = torch.bmm(dnum, weights.mT, out=self._values[1, : len(q)])
            dv[pairs.keys].addcmul_(faded, pairs.on_values)

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

    def _scores(self, q: Tensor, keys: Keys, pairs: Pairs) -> Tensor:
        """q·k times its factors, (items, keys, queries)."""
        q = q[pairs.queries]
        scores = torch.bmm(keys.k[pairs.keys].mT, q, out=self._memory[0, : len(q)])
        return _multiply_(scores, pairs.on_scores)

    def _faded_values(self, keys: Keys, pairs: Pairs) -> Tensor:
        v = keys.v[pairs.keys]
        if pairs.on_values is None:
            return v
        return torch.mul(v, pairs.on_values, out=self._values[0, : len(v)])

    def _fade_sums(self, sums: Tensor, keys: Keys) -> None:
        """Multiply by the decay from the start of a block to its queries, unless scores have it."""
        if self._has_past and keys.log_decay is not None and not self._fades_scores:
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
            if self._fades_scores:
                yield Pairs(items, items, on_scores=(own,))
            else:
                yield Pairs(items, items, on_weights=(own,))

    def _past(self, keys: Keys) -> Iterator[Pairs]:
        """Every block with every earlier block of its chunk; at most one chunk has such blocks.

        The two factors of a decay, from the key to the first token of the query's block and from
        there to the query, are ≤ 1, eq. (5): neither can overflow, and if one underflows so does
        the weight.
        """
        if not self._has_past:
            return
        log_decay = keys.log_decay
        after = self._after(log_decay) if self._fades_scores and log_decay is not None else None
        for offset in range(self._rows, len(keys.k), self._rows):
            for at in self._slices(len(keys.k) - offset):
                pairs = Pairs(slice(at.start + offset, at.stop + offset), at)
                if log_decay is not None:
                    first = log_decay[pairs.queries, :, :1]
                    difference = (first - log_decay[at]).to(keys.k.dtype)
                    before = exp2_flushed_(difference, self._root)
                    if after is None:
                        pairs = pairs._replace(on_values=before)
                    else:
                        pairs = pairs._replace(on_scores=(before.mT, after[pairs.queries]))
                yield pairs

    def _after(self, log_decay: Tensor) -> Tensor:
        difference = (log_decay - log_decay[..., :1]).to(self._like.dtype)
        return exp2_flushed_(difference, self._root)

    def _slices(self, count: int) -> Iterator[slice]:
        for start in range(0, count, self._at_once):
            yield slice(start, min(start + self._at_once, count))


def _multiply_(x: Tensor, factors: tuple[Tensor, ...]) -> Tensor:
    for factor in factors:
        x.mul_(factor)
    return x


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
