"""Backward of the chunked form: two sweeps over the chunks, with no tensor of size T × P.

Sweep 1 runs forward, recomputes the state before each chunk and from it the gradient of q. Sweep 2
runs backward and carries the gradient of the state, from which it computes the gradients of k and
v; it also computes all gradients inside the chunk, from recomputed scores. README.md, section 5.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from longhaul.kernels.power.call import PowerCall, Saved
from longhaul.kernels.power.torch.chunked.state import Carry, gradient_of_update, update_state
from longhaul.kernels.power.torch.chunking import CallSizes, Decay, Decays, Rows, Segment
from longhaul.kernels.power.torch.gates import gate_gradient
from longhaul.kernels.power.torch.workspace import QueryBuffers, Workspace, add_faded


class Gradients(NamedTuple):
    """The tensors to fill: dq, dk, dv in the dtype of accumulation, the others like their inputs.

    None means that a gradient is not wanted.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dlog_g: Tensor | None
    dkv: Tensor | None
    dnorm: Tensor | None


class BackwardPass:
    """One backward pass without packing; dkv and dnorm are gradients of the final state."""

    def __init__(
        self,
        call: PowerCall,
        saved: Saved,
        dout: Tensor | None,
        dkv: Tensor | None,
        dnorm: Tensor | None,
        into: Gradients,
    ) -> None:
        self.saved, self.into = saved, into
        self.problem = problem = CallSizes.of(call, saved.q, saved.v)
        like = into.dq.new_empty(0)
        self.dout = torch.zeros_like(saved.out) if dout is None else dout
        self.dkv, self.dnorm = dkv, dnorm
        self.decays = None if saved.log_g is None else Decays(saved.log_g, problem, like.dtype)
        self.work = Workspace(problem, like)
        self.carry = Carry(problem, like)
        # delta = Σ_v dout · out, from which the gradient of the denominator follows, eq. (11).
        self.delta = torch.linalg.vecdot(self.dout.to(like.dtype), saved.out.to(like.dtype))
        self.inverse = self.ddenominator = None
        if saved.inverse is not None and saved.is_live is not None:
            self.inverse = saved.inverse[..., None]  # (B, T, H, 1)
            ddenominator = (self.delta * saved.is_live).neg_()
            if not problem.scales_rows:
                ddenominator *= saved.inverse
            self.ddenominator = ddenominator[..., None]

    def run(self) -> None:
        """Both sweeps, one block of rows after the other."""
        saved, problem = self.saved, self.problem
        for rows in problem.row_blocks:
            self.carry.load(saved.kv, saved.norm, rows)
            for segment in problem.segments:
                self._read_segment(rows, segment)
            self.carry.load(self.dkv, self.dnorm, rows)
            if not self.carry.is_zero:
                # Like the state, its gradient is carried without the multiplicity.
                self.carry.sums.div_(self.carry.multiplicity)
            for segment in reversed(problem.segments):
                self._write_segment(rows, segment)
            self._store_dinitial(rows)
        if saved.log_g is not None and self.into.dlog_g is not None:
            self.into.dlog_g.copy_(self._dlog_g(saved.log_g))

    def _store_dinitial(self, rows: Rows) -> None:
        if self.into.dkv is None or self.into.dnorm is None:
            return
        self.carry.sums.mul_(self.carry.multiplicity)
        self.carry.store(self.into.dkv, self.into.dnorm, rows)

    def _load(self, rows: Rows, segment: Segment) -> Decay | None:
        work, saved = self.work, self.saved
        work.load(work.keys.k, saved.k, rows, segment)
        work.load(work.keys.v, saved.v, rows, segment)
        return None if self.decays is None else self.decays.take(rows, segment)

    def _load_queries(self, queries: QueryBuffers, heads: Rows, segment: Segment) -> None:
        """Load scaled queries and dnum. Where rows have units, a query is divided by den^(1/p), so
        that its weights are those of the mean, whose denominator is 1."""
        work = self.work
        work.load(queries.q, self.saved.q, heads, segment, self.problem.scale)
        if self.problem.scales_rows and self.inverse is not None:
            work.load(queries.unit, self.inverse, heads, segment)
            queries.q.mul_(queries.unit)
        self._load_dnum(queries, heads, segment)

    def _store_dq(self, queries: QueryBuffers, heads: Rows, segment: Segment, *, add: bool) -> None:
        queries.dq.mul_(self.problem.scale)
        if self.problem.scales_rows:
            queries.dq.mul_(queries.unit)
        self.work.store(queries.dq, self.into.dq, heads, segment, add=add)

    def _load_dnum(self, queries: QueryBuffers, heads: Rows, segment: Segment) -> None:
        """Load gradients of the numerators and, in row V, of the denominator, eq. (11)."""
        work, dnum = self.work, queries.num
        work.load(dnum, self.dout, heads, segment)
        dden = dnum[:, :, -1:]
        if self.inverse is None or self.ddenominator is None:
            dden.zero_()
            return
        if not self.problem.scales_rows:
            work.load(dden, self.inverse, heads, segment)
            dnum[:, :, :-1].mul_(dden)
        work.load(dden, self.ddenominator, heads, segment)

    def _faded_dnum(self, queries: QueryBuffers, segment: Segment, decay: Decay | None) -> Tensor:
        """dnum times the decays from the starts of the chunks, (blocks, rows, V + 1, tokens)."""
        dnum, faded = (x[: segment.blocks] for x in (queries.num, queries.state_num))
        return dnum if decay is None else torch.mul(dnum, decay.from_start, out=faded)

    def _read_segment(self, rows: Rows, segment: Segment) -> None:
        """Sweep 1: dφ(q_t) = exp(G_t) (multiplicity · S)ᵀ dnum_t, eq. (12), then update S."""
        problem, state, work = self.problem, self.carry, self.work
        is_last = segment.end == problem.T
        if not self._reads_state(segment) and is_last:
            return
        decay = self._load(rows, segment)
        if segment.chunks > 1 or not is_last:
            values = work.faded_values(segment, decay)
        reads = []
        if self._reads_state(segment):
            for rep, queries in enumerate(work.queries):
                self._load_queries(queries, rows.query_heads(rep, problem.R), segment)
                queries.dq.zero_()
                reads.append((queries, self._faded_dnum(queries, segment, decay)))
        for chunk in range(segment.chunks):
            if not state.is_zero:
                read = state.to_read()
                for queries, dnum in reads:
                    for n in segment.blocks_of(chunk):
                        queries.maps[n].contract(read, dnum[n])
            if chunk + 1 < segment.chunks or not is_last:
                update_state(work, state, values, segment, chunk, decay)
        for rep, (queries, _) in enumerate(reads):
            self._store_dq(queries, rows.query_heads(rep, problem.R), segment, add=False)

    def _reads_state(self, segment: Segment) -> bool:
        """Whether a chunk of the segment reads a state that may not be zero."""
        return segment.first > 0 or segment.chunks > 1 or self.saved.kv is not None

    def _write_segment(self, rows: Rows, segment: Segment) -> None:
        """Sweep 2: gradients of k and v from dS, and all gradients inside the chunks."""
        problem, dstate, work, keys = self.problem, self.carry, self.work, self.work.keys
        decay = self._load(rows, segment)
        reads_state = self._reads_state(segment)
        has_gradient = not dstate.is_zero or segment.chunks > 1
        dnums = []
        for rep, queries in enumerate(work.queries):
            heads = rows.query_heads(rep, problem.R)
            self._load_queries(queries, heads, segment)
            if reads_state:
                dnums.append(self._faded_dnum(queries, segment, decay))
            self._backward_inside(queries, segment, decay, adds=rep > 0)
            self._store_dq(queries, heads, segment, add=reads_state)
        if has_gradient:
            values = work.faded_values(segment, decay)
        for chunk in reversed(range(segment.chunks)):
            if has_gradient:
                gradient_of_update(work, dstate, values, segment, chunk)
            was_read = reads_state and (segment.first + chunk > 0 or self.saved.kv is not None)
            dstate.update(
                None if decay is None else decay.total[chunk],
                (
                    (dnum[n], queries.maps[n])
                    for queries, dnum in zip(work.queries, dnums, strict=True)
                    for n in segment.blocks_of(chunk)
                )
                if was_read
                else (),
            )
        if has_gradient:
            dv, state_dv = (x[: segment.blocks] for x in (keys.dv, keys.state_dv))
            add_faded(dv, state_dv, None if decay is None else decay.to_end)
        work.store(keys.dk, self.into.dk, rows, segment)
        work.store(keys.dv, self.into.dv, rows, segment)

    def _backward_inside(
        self, queries: QueryBuffers, segment: Segment, decay: Decay | None, *, adds: bool
    ) -> None:
        """Write dq, and write or add to dk and dv, of attention inside the chunks."""
        work, keys = self.work, self.work.keys
        q, dnum, dq, dk, dv = (
            x[: segment.blocks].flatten(0, 1)
            for x in (queries.q, queries.num, queries.dq, keys.dk, keys.dv)
        )
        work.inside.backward(q, work.inside_keys(segment, decay), dnum, (dq, dk, dv), adds=adds)

    def _dlog_g(self, log_g: Tensor) -> Tensor:
        """Eq. (15): the first sum is dout·out where the output is not divided by its weights' sum,
        and 0 where it is, because a factor common to all weights of a row cancels."""
        saved = self.saved
        row_sums = self.delta  # (B, T, H)
        if saved.is_live is not None:
            row_sums = row_sums * ~saved.is_live
        return gate_gradient(
            log_g,
            row_sums.double().unflatten(2, (self.problem.G, -1)).sum(dim=3),
            torch.linalg.vecdot(saved.k.to(self.into.dk.dtype), self.into.dk),
            self.problem.degree,
            ((self.dkv, saved.final_kv), (self.dnorm, saved.final_norm)),
        )
