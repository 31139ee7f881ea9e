"""Forward of the chunked form: one pass over the chunks, which carries a state between them.

README.md derives the steps and the equations.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from longhaul.kernels.power.call import Forward, PowerCall
from longhaul.kernels.power.state import denominator_floor, query_unit, state_size
from longhaul.kernels.power.torch.chunked.state import Carry, read_and_update
from longhaul.kernels.power.torch.chunking import CallSizes, Decay, Decays, Rows, Segment
from longhaul.kernels.power.torch.workspace import QueryBuffers, Workspace, add_faded


class ForwardPass:
    """One forward pass without packing: the steps of README.md, section 4."""

    def __init__(
        self, call: PowerCall, q: Tensor, k: Tensor, v: Tensor, log_g: Tensor | None, into: Forward
    ) -> None:
        self.q, self.k, self.v, self.into = q, k, v, into
        self.problem = problem = CallSizes.of(call, q, v)
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
        is_last = segment.end == problem.T and not problem.output_final_state
        read_and_update(
            *(work, self.state, segment, decay),
            queries=work.queries if is_read else (),
            norms=self._norms if is_read and problem.normalize else None,
            updates=segment.chunks - 1 if is_last else segment.chunks,
        )
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
