"""The state between chunks: reading it, updating it, and the gradient of the update."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from longhaul.kernels.power.torch.chunking import Decay, Problem, Rows
from longhaul.kernels.power.torch.features import multiplicity
from longhaul.kernels.power.torch.workspace import Workspace


class Carry:
    """A state carried between chunks, (rows, V + 1, P), or its gradient. The norm is row V.

    Memory is allocated at first use: a single chunk without states may have a degree whose P would
    not fit in any memory.
    """

    def __init__(self, problem: Problem, like: Tensor) -> None:
        self._problem, self._like = problem, like
        self._rows, self._V = problem.rows_per_block, problem.V
        self.is_zero = True

    @cached_property
    def multiplicity(self) -> Tensor:
        """Multiplicity of every feature, (P,)."""
        return multiplicity(self._problem.K, self._problem.degree, self._like)

    @cached_property
    def sums(self) -> Tensor:
        rows = self._rows[0] * self._rows[1]
        return self._like.new_empty(rows, self._V + 1, self._problem.P)

    @cached_property
    def _read(self) -> Tensor:
        return torch.empty_like(self.sums)

    def load(self, kv: Tensor | None, norm: Tensor | None, rows: Rows) -> None:
        """Start from a state (B, G, P, V) and (B, G, P), or from zero."""
        self.is_zero = kv is None and norm is None
        if self.is_zero:
            return
        by_head = self.sums.view(*self._rows, *self.sums.shape[1:])
        self.sums.zero_()
        if kv is not None:
            by_head[:, :, : self._V].copy_(kv[rows.batch, rows.heads].mT)
        if norm is not None:
            by_head[:, :, self._V].copy_(norm[rows.batch, rows.heads])

    def store(self, kv: Tensor, norm: Tensor, rows: Rows) -> None:
        """Copy the block's rows into a state (B, G, P, V) and (B, G, P)."""
        by_head = self.sums.view(*self._rows, *self.sums.shape[1:])
        kv[rows.batch, rows.heads] = by_head[:, :, : self._V].mT
        norm[rows.batch, rows.heads] = by_head[:, :, self._V]

    def to_read(self) -> Tensor:
        """The sums times the multiplicity of every feature, as queries need them, eq. (7)."""
        return torch.mul(self.sums, self.multiplicity, out=self._read)

    def add(self, values: Tensor, features: Tensor) -> None:
        """Add the sum over tokens of values featuresᵀ."""
        if self.is_zero:
            torch.bmm(values, features.transpose(1, 2), out=self.sums)
            self.is_zero = False
        else:
            self.sums.baddbmm_(values, features.transpose(1, 2))


def read_state(work: Workspace, read: Tensor, from_start: Tensor | None) -> None:
    """num += exp(G_t) (multiplicity · S) φ(q_t), eq. (10)."""
    for piece, q_map in zip(work.pieces, work.q_maps, strict=True):
        num = work.num[:, :, piece]
        if from_start is None:
            num.baddbmm_(read, q_map.features())
        else:
            from_state = torch.bmm(read, q_map.features(), out=work.scratch[:, :, piece])
            num.addcmul_(from_state, from_start[:, :, piece])


def update_state(work: Workspace, state: Carry, decay: Decay) -> None:
    """S ← exp(G_C) S + Σ_i exp(G_C − G_i) v_i φ(k_i)ᵀ, eq. (9)."""
    values = work.scaled(work.v, decay.to_end)
    if decay.total is not None and not state.is_zero:
        state.sums.mul_(decay.total)
    for piece, k_map in zip(work.pieces, work.k_maps, strict=True):
        state.add(values[:, :, piece], k_map.features())


def gradient_of_update(work: Workspace, dstate: Carry, decay: Decay) -> None:
    """From dS after a chunk compute dv, dk and, in place, dS before it, except for eq. (13)'s sum.

    dv_i = exp(G_C − G_i) dS φ(k_i) and dφ(k_i) = exp(G_C − G_i) dSᵀ v_i, eq. (14).
    """
    dread = dstate.to_read()
    values = work.scaled(work.v, decay.to_end)
    for piece, k_map in zip(work.pieces, work.k_maps, strict=True):
        torch.bmm(dread, k_map.features(), out=work.dv[:, :, piece])
        k_map.contract(dread, values[:, :, piece])
    if decay.to_end is not None:
        work.dv.mul_(decay.to_end)
    if decay.total is not None:
        dstate.sums.mul_(decay.total)
