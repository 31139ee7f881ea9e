"""The final state alone: eq. (9) and its gradient, chunk by chunk.

Without an output, no state is read and no pair of tokens is scored.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from longhaul.kernels.power.call import PowerCall
from longhaul.kernels.power.state import PowerState
from longhaul.kernels.power.torch.chunked.state import Carry, gradient_of_update, update_state
from longhaul.kernels.power.torch.chunking import Chunk, Decay, Problem, Rows
from longhaul.kernels.power.torch.gates import gate_gradient
from longhaul.kernels.power.torch.workspace import Workspace, Workspaces


class StateGradients(NamedTuple):
    """The tensors to fill: dk and dv in the dtype of accumulation, the others like their inputs.

    None means that there is no such input.
    """

    dk: Tensor
    dv: Tensor
    dlog_g: Tensor | None
    dkv: Tensor | None
    dnorm: Tensor | None


class StatePass:
    """One pass without packing, in either direction."""

    def __init__(self, call: PowerCall, k: Tensor, v: Tensor, log_g: Tensor | None) -> None:
        self.k, self.v, self.log_g = k, v, log_g
        self.problem = Problem.of(call, k, v)
        like = k.new_empty(0, dtype=torch.promote_types(k.dtype, torch.float32))
        self.decay = Decay.of(log_g, self.problem, like.dtype)
        self.workspaces = Workspaces(self.problem, like)
        self.carry = Carry(self.problem, like)

    def forward(self, kv: Tensor | None, norm: Tensor | None, into: PowerState) -> None:
        """Fill `into`, from the initial state."""
        for rows in self.problem.row_blocks:
            self.carry.load(kv, norm, rows)
            for chunk in self.problem.chunks:
                update_state(self._load(rows, chunk), self.carry, self.decay.take(rows, chunk))
            self.carry.store(into.kv, into.norm, rows)

    def backward(
        self, dkv: Tensor | None, dnorm: Tensor | None, final: PowerState, into: StateGradients
    ) -> None:
        """Fill `into` from the gradients of the final state, at least one of which is given."""
        for rows in self.problem.row_blocks:
            self.carry.load(dkv, dnorm, rows)
            # Like the state, its gradient is carried without the multiplicity.
            self.carry.sums.div_(self.carry.multiplicity)
            for chunk in reversed(self.problem.chunks):
                work = self._load(rows, chunk)
                gradient_of_update(work, self.carry, self.decay.take(rows, chunk))
                work.store(work.dk, into.dk, rows, chunk)
                work.store(work.dv, into.dv, rows, chunk)
            if into.dkv is not None and into.dnorm is not None:
                self.carry.sums.mul_(self.carry.multiplicity)
                self.carry.store(into.dkv, into.dnorm, rows)
        if self.log_g is not None and into.dlog_g is not None:
            k_dk = torch.linalg.vecdot(self.k.to(into.dk.dtype), into.dk)
            finals = (dkv, final.kv), (dnorm, final.norm)
            into.dlog_g.copy_(gate_gradient(self.log_g, None, k_dk, self.problem.degree, finals))

    def _load(self, rows: Rows, chunk: Chunk) -> Workspace:
        work = self.workspaces.of(chunk)
        work.load(work.k, self.k, rows, chunk)
        work.load(work.v, self.v, rows, chunk)
        return work
