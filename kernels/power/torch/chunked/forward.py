"""Forward of the chunked form: one pass over the chunks, which carries a state between them.

README.md derives the steps and the equations.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from longhaul.kernels.power.call import Forward, PowerCall
from longhaul.kernels.power.state import denominator_floor, query_unit, state_size
from longhaul.kernels.power.torch.chunked.state import Carry, update_state
from longhaul.kernels.power.torch.chunking import Decay, Decays, Problem, Rows, Segment
from longhaul.kernels.power.torch.workspace import QueryBuffers, Workspace, add_faded


class ForwardPass:
    """One forward pass without packing: the steps of README.md, section 4."""

    def __init__(
        self, call: PowerCall, q: Tensor, k: Tensor, v: Tensor, log_g: Tensor | None, into: Forward
    ) -> None:
        self.q, self.k, self.v, self.into = q, k, v, into
        self.problem = problem = Problem.of(call, q, v)
        like = q.new_empty(0, dtype=torch.promote_types(q.dtype, torch.float32))
        self.decays = None if log_g is None else Decays(log_g, problem, like.dtype)
        self.work = Workspace(problem, like)
        self.state = Carry(problem, like)

    def run(self, kv: Tensor | None, norm: Tensor | None) -> None:
        """Fill `into`, from the initial state."""
        problem, into = self.problem, self.into
        for rows in problem.row_blocks:
            self.state.load(kv, norm, rows)
            for segment in problem.segments:
                self._segment(rows, segment)
            if into.kv is not None and into.norm is not None:
                self.state.store(into.kv, into.norm, rows)

    def _segment(self, rows: Rows, segment: Segment) -> None:
        problem, work = self.problem, self.work
        decay = None if self.decays is None else self.decays.take(rows, segment)
        work.load(work.keys.k, self.k, rows, segment)
        work.load(work.keys.v, self.v, rows, segment)
        is_read = segment.chunks > 1 or not self.state.is_zero
        for rep, queries in enumerate(work.queries):
            heads = rows.query_heads(rep, problem.R)
            work.load(queries.q, self.q, heads, segment, problem.scale)
            self._attend(queries, segment, decay)
        self._read_and_update(segment, decay, is_read=is_read)
        for rep, queries in enumerate(work.queries):
            heads = rows.query_heads(rep, problem.R)
            if is_read:
                num, read = (x[: segment.blocks] for x in (queries.num, queries.state_num))
                add_faded(num, read, None if decay is None else decay.from_start)
            self._finish(queries, heads, segment, decay, is_read=is_read)

    def _attend(self, queries: QueryBuffers, segment: Segment, decay: Decay | None) -> None:
        """Attention inside the chunks, eq. (4)."""
        work = self.work
        q, num = (x[: segment.blocks].flatten(0, 1) for x in (queries.q, queries.num))
        keys = work.inside_keys(segment, decay)
        if self.problem.scales_rows:
            unit = queries.unit[: segment.blocks].flatten(0, 1)
            if not self.state.is_zero:
                unit.copy_(query_unit(q, dim=1))
            else:
                work.inside.find_units(q, keys, unit)
            q.div_(unit)
        work.inside.forward(q, keys, num)

    def _read_and_update(self, segment: Segment, decay: Decay | None, *, is_read: bool) -> None:
        """Read the state before each chunk, eq. (10), and update it with the chunk, eq. (9).

        What is read still lacks the decays from the starts of the chunks.
        """
        problem, work, state = self.problem, self.work, self.state
        needs_last = problem.output_final_state or segment.end < problem.T
        if segment.chunks > 1 or needs_last:
            values = work.faded_values(segment, decay)
        for chunk in range(segment.chunks):
            blocks = segment.blocks_of(chunk)
            if is_read and problem.normalize:
                self._norms[chunk] = 0 if state.is_zero else state.sums[:, -1:]
            read = None if state.is_zero else state.to_read()
            for queries in work.queries if is_read else ():
                for n in blocks:
                    if read is None:
                        queries.state_num[n].zero_()
                    else:
                        queries.maps[n].read(read, queries.state_num[n])
            if chunk + 1 < segment.chunks or needs_last:
                update_state(work, state, values, segment, chunk, decay)

    @cached_property
    def _norms(self) -> Tensor:
        """Norms of the states before the chunks of a segment, (chunks, rows, 1, P)."""
        rows, _, P = self.state.sums.shape
        return self.state.sums.new_empty(self.problem.chunks_at_once, rows, 1, P)

    def _finish(
        self,
        queries: QueryBuffers,
        heads: Rows,
        segment: Segment,
        decay: Decay | None,
        *,
        is_read: bool,
    ) -> None:
        """Divide numerators by denominators, and store what the pass returns."""
        work, into = self.work, self.into
        if into.inverse is not None and into.is_live is not None:
            inverse, is_live = self._normalize(queries, segment, decay, is_read=is_read)
            work.store(inverse, into.inverse[..., None], heads, segment)
            work.store(is_live, into.is_live[..., None], heads, segment)
        work.store(queries.num, into.out, heads, segment)

    def _normalize(
        self, queries: QueryBuffers, segment: Segment, decay: Decay | None, *, is_read: bool
    ) -> tuple[Tensor, Tensor]:
        """Divide num by its last row. Returns the inverse denominator, or its p-th root where rows
        have units, and whether it is above its floor, both (blocks, rows, 1, tokens)."""
        degree = self.problem.degree
        q, num = (x[: segment.blocks] for x in (queries.q, queries.num))
        denominator = num[:, :, -1:]
        if self.problem.scales_rows and not is_read:
            # The largest weight of a row is near 1, unless all of them are 0.
            is_live = denominator > 0
            return self._divide(queries, num, torch.where(is_live, denominator, 1.0)), is_live
        query_norm = q.square().sum(dim=2, keepdim=True) ** (degree / 2)
        state_norm = query_norm.new_zeros(())
        if is_read:
            # Either every chunk is a block, or there is one chunk.
            state_norm = state_size(self._norms[: segment.chunks], self.state.multiplicity)
            state_norm = state_norm if decay is None else state_norm * decay.from_start
        floor = denominator_floor(degree, query_norm, state_norm, num.dtype)
        is_live = (denominator.abs() if degree % 2 else denominator) >= floor
        return self._divide(queries, num, torch.where(is_live, denominator, floor)), is_live

    def _divide(self, queries: QueryBuffers, num: Tensor, denominator: Tensor) -> Tensor:
        inverse = denominator.reciprocal()
        num[:, :, :-1].mul_(inverse)
        if not self.problem.scales_rows:
            return inverse
        return inverse.pow_(1 / self.problem.degree).div_(queries.unit[: len(num)])
