"""Forward of the chunked form: one pass over the chunks, which carries a state between them.

README.md derives the steps and the equations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longhaul.kernels.power.call import Forward, PowerCall
from longhaul.kernels.power.state import denominator_floor, query_unit, state_size
from longhaul.kernels.power.torch.chunked.state import Carry, read_state, update_state
from longhaul.kernels.power.torch.chunking import Chunk, Decay, Problem, Rows
from longhaul.kernels.power.torch.workspace import Workspace, Workspaces


class ForwardPass:
    """One forward pass without packing: the steps of README.md, section 4."""

    def __init__(
        self, call: PowerCall, q: Tensor, k: Tensor, v: Tensor, log_g: Tensor | None, into: Forward
    ) -> None:
        self.q, self.k, self.v, self.into = q, k, v, into
        self.problem = problem = Problem.of(call, q, v)
        like = q.new_empty(0, dtype=torch.promote_types(q.dtype, torch.float32))
        self.decay = Decay.of(log_g, problem, like.dtype)
        self.workspaces = Workspaces(problem, like)
        self.state = Carry(problem, like)

    def run(self, kv: Tensor | None, norm: Tensor | None) -> None:
        """Fill `into`, from the initial state."""
        problem, into = self.problem, self.into
        for rows in problem.row_blocks:
            self.state.load(kv, norm, rows)
            for chunk in problem.chunks:
                self._chunk(rows, chunk)
            if into.kv is not None and into.norm is not None:
                self.state.store(into.kv, into.norm, rows)

    def _chunk(self, rows: Rows, chunk: Chunk) -> None:
        problem, state, into = self.problem, self.state, self.into
        work = self.workspaces.of(chunk)
        decay = self.decay.take(rows, chunk)
        work.load(work.k, self.k, rows, chunk)
        work.load(work.v, self.v, rows, chunk)
        work.inside.set_decay(decay.log_decay)
        read = None if state.is_zero else state.to_read()
        for rep in range(problem.R):
            heads = rows.query_heads(rep, problem.R)
            work.load(work.q, self.q, heads, chunk, problem.scale)
            if problem.scales_rows and read is not None:
                work.q.div_(work.unit.copy_(query_unit(work.q, dim=1)))
            # Step 1: attention inside the chunk. Step 2: read the state.
            work.inside.forward(finds_units=problem.scales_rows and read is None)
            if read is not None:
                read_state(work, read, decay.from_start)
            if into.inverse is not None and into.is_live is not None:
                inverse, is_live = self._normalize(work, read, decay.from_start)
                work.store(inverse, into.inverse[..., None], heads, chunk)
                work.store(is_live, into.is_live[..., None], heads, chunk)
            work.store(work.num, into.out, heads, chunk)
        # Step 3: update the state with the tokens of the chunk.
        if chunk.end < problem.T or problem.output_final_state:
            update_state(work, state, decay)

    def _normalize(
        self, work: Workspace, read: Tensor | None, from_start: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Divide num by its last row. Returns the inverse denominator, or its p-th root where rows
        have units, and whether it is above its floor, both (rows, 1, tokens)."""
        degree = self.problem.degree
        denominator = work.num[:, -1:]
        if self.problem.scales_rows and read is None:
            # The largest weight of a row is near 1, unless all of them are 0.
            is_live = denominator > 0
            return self._divide(work, torch.where(is_live, denominator, 1.0)), is_live
        squares = torch.mul(work.q, work.q, out=work.squares)
        query_norm = squares.sum(dim=1, keepdim=True) ** (degree / 2)
        state_norm = query_norm.new_zeros(())
        if read is not None:
            state_norm = state_size(self.state.sums[:, -1:], self.state.multiplicity)
            state_norm = state_norm if from_start is None else state_norm * from_start
        floor = denominator_floor(degree, query_norm, state_norm, work.num.dtype)
        is_live = (denominator.abs() if degree % 2 else denominator) >= floor
        return self._divide(work, torch.where(is_live, denominator, floor)), is_live

    def _divide(self, work: Workspace, denominator: Tensor) -> Tensor:
        inverse = denominator.reciprocal()
        work.num[:, :-1].mul_(inverse)
        if not self.problem.scales_rows:
            return inverse
        return inverse.pow_(1 / self.problem.degree).div_(work.unit)
