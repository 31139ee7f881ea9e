"""Causal power attention inside one chunk, block of queries by block of queries.

With a single chunk this is the attention form. Tensors are (rows, width, tokens): a row is one
key head of one batch entry, and tokens run innermost as in the features. The value tensors carry
a row of ones at index V, so that index V of every product is the denominator.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

# Queries per block. Scores of a block stay in cache, and the wasted half of the diagonal is small.
_BLOCK = 128


class InsideChunk:
    """Scratch memory and the arithmetic for `rows` rows of `tokens` tokens, eq. (4)."""

    def __init__(self, rows: int, tokens: int, v_dim: int, degree: int, like: Tensor) -> None:
        self.degree = degree
        edges = [*range(0, tokens, _BLOCK), tokens]
        self.blocks = list(pairwise(edges))
        block = min(_BLOCK, tokens)
        self._scores = like.new_empty(2, rows * tokens * block)
        self._v = like.new_empty(rows, v_dim + 1, tokens)
        self._dnum = like.new_empty(rows, v_dim + 1, block)
        self._rows = rows
        self._causal = like.new_ones(block, block).triu_()  # (keys, queries)
        # Added to a float64 difference of logs, it turns the future into exp(−inf) = 0 before exp
        # can overflow.
        self._future = torch.zeros(block, block, dtype=torch.float64, device=like.device)
        self._future.masked_fill_(self._causal == 0, -torch.inf)
        self._decay: list[tuple[Tensor, Tensor, Tensor]] | None = None

    def set_decay(self, log_decay: Tensor | None) -> None:
        """Take the running sums of log_g in this chunk, (rows, 1, tokens) float64, None without gates.

        A block's own tokens get exp(G_t − G_i) as a matrix. All keys before the block get it as a
        product of two factors ≤ 1 that meet at the block's first token, eq. (5): neither can
        overflow, and where one underflows the weight itself does.
        """
        if log_decay is None:
            self._decay = None
            return
        dtype = self._scores.dtype
        self._decay = []
        for start, end in self.blocks:
            own = log_decay[:, :, start:end]  # (rows, 1, queries)
            first = own[:, :, :1]
            matrix = own - own.transpose(1, 2)
            matrix += self._future[: end - start, : end - start]
            before = (first - log_decay[:, :, :start]).to(dtype).exp_()
            self._decay.append((matrix.to(dtype).exp_(), before, (own - first).to(dtype).exp_()))

    def _score_views(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        size = self._rows * end * (end - start)
        shape = (self._rows, end, end - start)
        return self._scores[0, :size].view(shape), self._scores[1, :size].view(shape)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, num: Tensor) -> None:
        """Write numerators and denominators (rows, V + 1, tokens) into num."""
        for index, (start, end) in enumerate(self.blocks):
            weights, _ = self._score_views(start, end)
            torch.bmm(k[:, :, :end].transpose(1, 2), q[:, :, start:end], out=weights)
            _raise(weights, self.degree)
            own = weights[:, start:]
            num_block = num[:, :, start:end]
            if self._decay is None:
                own.mul_(self._causal[: end - start, : end - start])
                torch.bmm(v[:, :, :end], weights, out=num_block)
                continue
            matrix, before, after = self._decay[index]
            own.mul_(matrix)
            if start == 0:
                torch.bmm(v[:, :, :end], own, out=num_block)
                continue
            v_before = torch.mul(v[:, :, :start], before, out=self._v[:, :, :start])
            torch.bmm(v_before, weights[:, :start], out=num_block)
            num_block.mul_(after)
            num_block.baddbmm_(v[:, :, start:end], own)

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, dnum: Tensor, grads: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        """Write dq and add to dk and dv; scores are recomputed."""
        dq, dk, dv = grads
        p = self.degree
        for index, (start, end) in enumerate(self.blocks):
            weights, dscores = self._score_views(start, end)
            q_block, dnum_block = q[:, :, start:end], dnum[:, :, start:end]
            torch.bmm(k[:, :, :end].transpose(1, 2), q_block, out=weights)
            if self._decay is None:
                matrix = self._causal[: end - start, : end - start]
                dnum_before, v_before = dnum_block, v[:, :, :start]
            else:
                matrix, before, after = self._decay[index]
                dnum_before = torch.mul(dnum_block, after, out=self._dnum[:, :, : end - start])
                v_before = torch.mul(v[:, :, :start], before, out=self._v[:, :, :start])
            if start:
                torch.bmm(v_before.transpose(1, 2), dnum_before, out=dscores[:, :start])
            own = dscores[:, start:]
            torch.bmm(v[:, :, start:end].transpose(1, 2), dnum_block, out=own)
            own.mul_(matrix)
            if p == 2:
                dscores.mul_(weights)
                weights.square_()
            elif p > 2:
                power = weights.pow(p - 1)
                dscores.mul_(power)
                weights.mul_(power)
            weights[:, start:].mul_(matrix)
            torch.bmm(k[:, :, :end], dscores, out=dq[:, :, start:end])
            dk[:, :, :end].baddbmm_(q_block, dscores.transpose(1, 2), alpha=p)
            dv[:, :, start:end].baddbmm_(dnum_block, weights[:, start:].transpose(1, 2))
            if start and self._decay is None:
                dv[:, :, :start].baddbmm_(dnum_block, weights[:, :start].transpose(1, 2))
            elif start:
                dv_before = self._v[:, :, :start]
                torch.bmm(dnum_before, weights[:, :start].transpose(1, 2), out=dv_before)
                dv[:, :, :start].addcmul_(dv_before, before)
        dq.mul_(p)


def _raise(x: Tensor, degree: int) -> None:
    """x^degree in place; squares and cubes are plain products in torch, other powers are slow."""
    if degree > 1:
        x.square_()
        while degree % 4 == 0:
            x.square_()
            degree //= 2
        if degree > 2:
            x.pow_(degree // 2)
