"""The linear-cost form: attention inside a chunk, a state between chunks, one pass over T.

The backward pass is in chunked_backward.py. README.md derives both; equation numbers are its.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from longhaul.kernels.power.chunked_backward import Saved, backward
from longhaul.kernels.power.chunking import Chunk, Decay, Problem, Rows
from longhaul.kernels.power.features import multiplicity
from longhaul.kernels.power.state import PowerState, denominator_floor
from longhaul.kernels.power.workspace import (
    Carry,
    Workspace,
    Workspaces,
    read_state,
    update_state,
)


def power_attention_chunked(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T G K"],
    v: Float[Tensor, "B T G V"],
    log_g: Float[Tensor, "B T G"] | None,
    initial_state: PowerState | None,
    *,
    degree: int,
    scale: float,
    normalize: bool,
    chunk_size: int,
    output_final_state: bool,
) -> tuple[Float[Tensor, "B T H V"], PowerState | None]:
    """Output and final state; with chunk_size ≥ T it is the attention form."""
    B, T, H, K = q.shape
    G, V = v.shape[2:]
    problem = Problem(
        B=B,
        T=T,
        H=H,
        G=G,
        K=K,
        V=V,
        degree=degree,
        scale=scale,
        normalize=normalize,
        chunk_size=min(chunk_size, T),
        output_final_state=output_final_state,
    )
    kv, norm = (None, None) if initial_state is None else initial_state
    out, kv, norm = _ChunkedAttention.apply(q, k, v, log_g, kv, norm, problem)  # type: ignore[no-untyped-call]
    return out, PowerState(kv, norm) if output_final_state else None


class _ChunkedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_g: Tensor | None,
        kv: Tensor | None,
        norm: Tensor | None,
        problem: Problem,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        call = _Forward(q, k, v, log_g, problem)
        call.run(kv, norm)
        out = call.out.to(q.dtype)
        # Saved: the inputs, the output and its denominators. Recomputed: scores, features, states.
        ctx.save_for_backward(
            q, k, v, log_g, kv, norm, call.out, call.inverse, call.is_live, call.kv, call.norm
        )
        ctx.problem = problem
        ctx.set_materialize_grads(False)
        return out, call.kv, call.norm

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dout: Tensor | None, dkv: Tensor | None, dnorm: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        saved = Saved(*ctx.saved_tensors)
        # Someone may call backward under autocast, too.
        with torch.autocast(saved.q.device.type, enabled=False):
            grads = backward(saved, dout, dkv, dnorm, ctx.problem)
        inputs = (saved.q, saved.k, saved.v, saved.log_g, saved.initial_kv, saved.initial_norm)
        cast = [
            None if grad is None or x is None else grad.to(x.dtype)
            for grad, x in zip(grads, inputs, strict=True)
        ]
        return (*cast, None)


class _Forward:
    """One forward pass: its tensors, and the steps of README.md, section 4."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, log_g: Tensor | None, problem: Problem
    ) -> None:
        self.q, self.k, self.v, self.problem = q, k, v, problem
        like = q.new_empty(0, dtype=torch.promote_types(q.dtype, torch.float32))
        self.decay = Decay.of(log_g, problem, like.dtype)
        self.workspaces = Workspaces(problem, like)
        self.times = multiplicity(problem.K, problem.degree, like)  # (P,)
        self.state = Carry(problem, self.times, like)
        B, T, G, H, V, P = (getattr(problem, name) for name in "BTGHVP")
        self.out = like.new_empty(B, T, H, V)
        self.inverse = self.is_live = self.kv = self.norm = None
        if problem.normalize:
            self.inverse = like.new_empty(B, T, H, 1)
            self.is_live = like.new_empty(B, T, H, 1, dtype=torch.bool)
        if problem.output_final_state:
            self.kv, self.norm = like.new_empty(B, G, P, V), like.new_empty(B, G, P)

    def run(self, kv: Tensor | None, norm: Tensor | None) -> None:
        """Fill the outputs."""
        problem = self.problem
        for rows in problem.row_blocks:
            self.state.load(kv, norm, rows)
            for chunk in problem.chunks:
                self._chunk(rows, chunk)
            if self.kv is not None and self.norm is not None:
                self.state.store(self.kv, self.norm, rows)

    def _chunk(self, rows: Rows, chunk: Chunk) -> None:
        problem, state = self.problem, self.state
        work = self.workspaces.of(chunk)
        decay = self.decay.take(rows, chunk)
        work.load(work.k, self.k, rows, chunk)
        work.load(work.v, self.v, rows, chunk)
        work.inside.set_decay(decay.log_decay)
        read = None if state.is_zero else state.to_read()
        for rep in range(problem.R):
            heads = rows.query_heads(rep, problem.R)
            work.load(work.q, self.q, heads, chunk, problem.scale)
            # Step 1: attention inside the chunk. Step 2: what the state adds.
            work.inside.forward()
            if read is not None:
                read_state(work, read, decay.from_start)
            if self.inverse is not None and self.is_live is not None:
                inverse, is_live = self._normalize(work, read, decay.from_start)
                work.store(inverse, self.inverse, heads, chunk)
                work.store(is_live, self.is_live, heads, chunk)
            work.store(work.num, self.out, heads, chunk)
        # Step 3: carry the state over, with what the chunk adds to it.
        if chunk.end < problem.T or problem.output_final_state:
            update_state(work, state, decay)

    def _normalize(
        self, work: Workspace, read: Tensor | None, from_start: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Divide num by its last row; the inverse and whether it is one, (rows, 1, tokens)."""
        degree = self.problem.degree
        denominator = work.num[:, -1:]
        squares = torch.mul(work.q, work.q, out=work.squares)
        query_norm = squares.sum(dim=1, keepdim=True) ** (degree / 2)
        state_norm = query_norm.new_zeros(())
        if read is not None:
            state_norm = (read[:, -1:] * self.state.sums[:, -1:]).sum(-1, keepdim=True).sqrt()
            state_norm = state_norm if from_start is None else state_norm * from_start
        floor = denominator_floor(degree, query_norm, state_norm, work.num.dtype)
        is_live = (denominator.abs() if degree % 2 else denominator) >= floor
        inverse = torch.where(is_live, denominator, floor).reciprocal_()
        work.num[:, :-1].mul_(inverse)
        return inverse, is_live
