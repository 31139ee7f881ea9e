"""Backward of the chunked form: two sweeps over the chunks, with no tensor of size T × P.

Sweep 1 runs forward, recomputes the state before each chunk and from it the gradient of q. Sweep 2
runs backward and carries the gradient of the state, from which it computes the gradients of k and
v; it also computes all gradients inside the chunk, from recomputed scores. README.md, section 5.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from einops import reduce
from torch import Tensor

from longhaul.kernels.power.call import PowerCall, Saved
from longhaul.kernels.power.torch.chunked.state import Carry, gradient_of_update, update_state
from longhaul.kernels.power.torch.chunking import Chunk, Decay, Problem, Rows
from longhaul.kernels.power.torch.gates import gate_gradient
from longhaul.kernels.power.torch.workspace import Workspace, Workspaces


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
        self.problem = problem = Problem.of(call, saved.q, saved.v)
        like = into.dq.new_empty(0)
        self.dout = torch.zeros_like(saved.out) if dout is None else dout
        self.dkv, self.dnorm = dkv, dnorm
        self.decay = Decay.of(saved.log_g, problem, like.dtype)
        self.workspaces = Workspaces(problem, like)
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
            for chunk in problem.chunks:
                self._read_chunk(rows, chunk)
            self.carry.load(self.dkv, self.dnorm, rows)
            if not self.carry.is_zero:
                # Like the state, its gradient is carried without the multiplicity.
                self.carry.sums.div_(self.carry.multiplicity)
            for chunk in reversed(problem.chunks):
                self._write_chunk(rows, chunk)
            self._store_dinitial(rows)
        if saved.log_g is not None and self.into.dlog_g is not None:
            self.into.dlog_g.copy_(self._dlog_g(saved.log_g))

    def _store_dinitial(self, rows: Rows) -> None:
        if self.into.dkv is None or self.into.dnorm is None or self.carry.is_zero:
            return
        self.carry.sums.mul_(self.carry.multiplicity)
        self.carry.store(self.into.dkv, self.into.dnorm, rows)

    def _load_queries(self, work: Workspace, heads: Rows, chunk: Chunk) -> None:
        """Load scaled queries and dnum. Where rows have units, a query is divided by den^(1/p), so
        that its weights are those of the mean, whose denominator is 1."""
        work.load(work.q, self.saved.q, heads, chunk, self.problem.scale)
        if self.problem.scales_rows and self.inverse is not None:
            work.load(work.unit, self.inverse, heads, chunk)
            work.q.mul_(work.unit)
        self._load_dnum(work, heads, chunk)

    def _store_dq(self, work: Workspace, heads: Rows, chunk: Chunk, *, add: bool) -> None:
        work.dq.mul_(self.problem.scale)
        if self.problem.scales_rows:
            work.dq.mul_(work.unit)
        work.store(work.dq, self.into.dq, heads, chunk, add=add)

    def _load_dnum(self, work: Workspace, heads: Rows, chunk: Chunk) -> None:
        """Load gradients of the numerators and, in row V, of the denominator, eq. (11)."""
        work.load(work.dnum, self.dout, heads, chunk)
        dden = work.dnum[:, -1:]
        if self.inverse is None or self.ddenominator is None:
            dden.zero_()
            return
        if not self.problem.scales_rows:
            work.load(dden, self.inverse, heads, chunk)
            work.dnum[:, :-1].mul_(dden)
        work.load(dden, self.ddenominator, heads, chunk)

    def _read_chunk(self, rows: Rows, chunk: Chunk) -> None:
        """Sweep 1: dφ(q_t) = exp(G_t) (multiplicity · S)ᵀ dnum_t, eq. (12), then update S."""
        saved, problem, state = self.saved, self.problem, self.carry
        is_last = chunk.end == problem.T
        if state.is_zero and is_last:
            return
        work = self.workspaces.of(chunk)
        decay = self.decay.take(rows, chunk)
        if not state.is_zero:
            read = state.to_read()
            for rep in range(problem.R):
                heads = rows.query_heads(rep, problem.R)
                self._load_queries(work, heads, chunk)
                dnum = work.scaled(work.dnum, decay.from_start)
                for piece, q_map in zip(work.pieces, work.q_maps, strict=True):
                    q_map.contract(read, dnum[:, :, piece])
                self._store_dq(work, heads, chunk, add=False)
        if not is_last:
            work.load(work.k, saved.k, rows, chunk)
            work.load(work.v, saved.v, rows, chunk)
            update_state(work, state, decay)

    def _write_chunk(self, rows: Rows, chunk: Chunk) -> None:
        """Sweep 2: gradients of k and v from dS, and all gradients inside the chunk."""
        saved, problem, dstate = self.saved, self.problem, self.carry
        has_read = chunk.number > 0 or saved.kv is not None
        work = self.workspaces.of(chunk)
        decay = self.decay.take(rows, chunk)
        work.inside.set_decay(decay.log_decay)
        work.load(work.k, saved.k, rows, chunk)
        work.load(work.v, saved.v, rows, chunk)
        if dstate.is_zero:
            work.dk.zero_()
            work.dv.zero_()
        else:
            gradient_of_update(work, dstate, decay)
        for rep in range(problem.R):
            heads = rows.query_heads(rep, problem.R)
            self._load_queries(work, heads, chunk)
            work.inside.backward()
            self._store_dq(work, heads, chunk, add=has_read)
            if has_read:
                dnum = work.scaled(work.dnum, decay.from_start)
                for piece, q_map in zip(work.pieces, work.q_maps, strict=True):
                    dstate.add(dnum[:, :, piece], q_map.features())
        work.store(work.dk, self.into.dk, rows, chunk)
        work.store(work.dv, self.into.dv, rows, chunk)

    def _dlog_g(self, log_g: Tensor) -> Tensor:
        """Eq. (15): the first sum is dout·out where the output is not divided by its weights' sum,
        and 0 where it is, because a factor common to all weights of a row cancels."""
        saved = self.saved
        row_sums = self.delta  # (B, T, H)
        if saved.is_live is not None:
            row_sums = row_sums * ~saved.is_live
        return gate_gradient(
            log_g,
            reduce(row_sums.double(), "b t (g r) -> b t g", "sum", g=self.problem.G),
            torch.linalg.vecdot(saved.k.to(self.into.dk.dtype), self.into.dk),
            self.problem.degree,
            ((self.dkv, saved.final_kv), (self.dnorm, saved.final_norm)),
        )
