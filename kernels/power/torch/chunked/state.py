"""The state between chunks: reading it, updating it, and the gradient of the update."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from longhaul.kernels.power.torch import compiled
from longhaul.kernels.power.torch.chunking import CallSizes, Decay, Rows, Segment
from longhaul.kernels.power.torch.features import StateToRead, multiplicity
from longhaul.kernels.power.torch.workspace import FeatureMap, QueryBuffers, Workspace


class Carry:
    """A state carried between chunks, (rows, V + 1, P), or its gradient. The norm is row V.

    Memory is allocated at first use: a single chunk without states may have a degree whose P would
    not fit in any memory.
    """

    def __init__(self, problem: CallSizes, like: Tensor) -> None:
        self._problem, self._like = problem, like
        self._rows, self._V = problem.rows_per_block, problem.V
        self.is_compiled = compiled.maps_features(problem.degree, like)
        self.is_zero = True

    @cached_property
    def multiplicity(self) -> Tensor:
        """Multiplicity of every feature, (P,)."""
        return multiplicity(self._problem.K, self._problem.degree, self._like)

    @cached_property
    def sums(self) -> Tensor:
        return self._like.new_empty(self._problem.num_rows, self._V + 1, self._problem.P)

    @cached_property
    def _read(self) -> StateToRead:
        problem = self._problem
        if self.is_compiled:
            return StateToRead(self.sums, [])
        return StateToRead.of(torch.empty_like(self.sums), problem.K, problem.degree)

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

    def to_read(self) -> StateToRead:
        """The sums as queries need them, eq. (7); to be read before the next update."""
        if not self.is_compiled:
            torch.mul(self.sums, self.multiplicity, out=self._read.state)
        return self._read

    def update(self, total: Tensor | None, blocks: Iterable[tuple[Tensor, FeatureMap]]) -> None:
        """Multiply by the decay (rows, 1, 1) over a chunk, then add the sums over the tokens of
        blocks of values φ(x)ᵀ."""
        keep: Tensor | float = 1.0 if total is None else total
        for values, x in blocks:
            x.add_to(self.sums, values, 0.0 if self.is_zero else keep)
            self.is_zero, keep = False, 1.0
        if isinstance(keep, Tensor) and not self.is_zero:
            self.sums.mul_(keep)


def update_state(
    work: Workspace,
    state: Carry,
    values: Tensor,
    segment: Segment,
    chunk: int,
    decay: Decay | None,
) -> None:
    """S ← exp(G_C) S + Σ_i exp(G_C − G_i) v_i φ(k_i)ᵀ, eq. (9); values are exp(G_C − G_i) v_i."""
    total = None if decay is None else decay.total[chunk]
    state.update(total, ((values[n], work.keys.maps[n]) for n in segment.blocks_of(chunk)))


def read_and_update(
    work: Workspace,
    state: Carry,
    segment: Segment,
    decay: Decay | None,
    *,
    queries: Sequence[QueryBuffers],
    norms: Tensor | None,
    updates: int,
) -> None:
    """Read the state before each chunk of a segment, eq. (10), and update it with the first ones.

    What is read still lacks the decays from the starts of the chunks. The norms of the states
    before the chunks, (chunks, rows, 1, P), are written too.
    """
    if not queries and not updates:
        return  # without a state, whose memory may not exist
    values = work.faded_values(segment, decay) if updates else None
    if state.is_compiled:
        total = None if decay is None else decay.total.contiguous()
        read = [(x.q[: segment.blocks], x.state_num[: segment.blocks]) for x in queries]
        keys = None if values is None else (work.keys.k[: segment.blocks], values)
        compiled.read_and_update(
            *(state.sums, read, norms, keys, total),
            is_zero=state.is_zero,
            chunks=segment.chunks,
            updates=updates,
        )
        state.is_zero = state.is_zero and not updates
        return
    for chunk in range(segment.chunks):
        if norms is not None:
            norms[chunk] = 0 if state.is_zero else state.sums[:, -1:]
        to_read = None if state.is_zero else state.to_read()
        for each in queries:
            for n in segment.blocks_of(chunk):
                if to_read is None:
                    each.state_num[n].zero_()
                else:
                    each.maps[n].read(to_read, each.state_num[n])
        if values is not None and chunk < updates:
            update_state(work, state, values, segment, chunk, decay)


def gradient_of_update(
    work: Workspace,
    dstate: Carry,
    values: Tensor,
    segment: Segment,
    chunk: int,
) -> None:
    """From dS after a chunk write state_dv and add to dk; the caller then takes dS over the chunk,
    eq. (13).

    state_dv_i = dS φ(k_i) still lacks a factor exp(G_C − G_i), eq. (14).
    """
    keys = work.keys
    dread = None if dstate.is_zero else dstate.to_read()
    for n in segment.blocks_of(chunk):
        if dread is None:
            keys.state_dv[n].zero_()
        else:
            keys.maps[n].read(dread, keys.state_dv[n])
            keys.maps[n].contract(dread, values[n])
