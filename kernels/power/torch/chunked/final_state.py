"""The final state alone: eq. (9) and its gradient, chunk by chunk.

Without an output, no state is read and no pair of tokens is scored.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from longhaul.kernels.power.call import PowerCall
from longhaul.kernels.power.state import PowerState
from longhaul.kernels.power.torch.chunked.state import Carry, gradient_of_update, read_and_update
from longhaul.kernels.power.torch.chunking import CallSizes, Decay, Decays, Rows, Segment
from longhaul.kernels.power.torch.gates import gate_gradient
from longhaul.kernels.power.torch.workspace import Workspace


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
        self.problem = CallSizes.of(call, k, v)
        like = k.new_empty(0, dtype=torch.promote_types(k.dtype, torch.float32))
        self.decays = None if log_g is None else Decays(log_g, self.problem, like.dtype)
        self.work = Workspace(self.problem, like)
        self.carry = Carry(self.problem, like)

    def forward(self, kv: Tensor | None, norm: Tensor | None, into: PowerState) -> None:
        """Fill `into`, from the initial state."""
        for rows in self.problem.row_blocks:
            self.carry.load(kv, norm, rows)
            for segment in self.problem.segments:
                decay = self._load(rows, segment)
                read_and_update(
                    *(self.work, self.carry, segment, decay),
                    queries=(),
                    norms=None,
                    updates=segment.chunks,
                )
            self.carry.store(into.kv, into.norm, rows)

    def backward(
        self, dkv: Tensor | None, dnorm: Tensor | None, final: PowerState, into: StateGradients
    ) -> None:
        """Fill `into` from the gradients of the final state, at least one of which is given."""
        work, keys = self.work, self.work.keys
        for rows in self.problem.row_blocks:
            self.carry.load(dkv, dnorm, rows)
            # Like the state, its gradient is carried without the multiplicity.
            self.carry.sums.div_(self.carry.multiplicity)
            for segment in reversed(self.problem.segments):
                decay = self._load(rows, segment)
                values = work.faded_values(segment, decay)
                keys.dk.zero_()
                for chunk in reversed(range(segment.chunks)):
                    gradient_of_update(work, self.carry, values, segment, chunk)
                    self.carry.update(None if decay is None else decay.total[chunk], ())
                if decay is not None:
                    keys.state_dv[: segment.blocks].mul_(decay.to_end)
                work.store(keys.dk, into.dk, rows, segment)
                work.store(keys.state_dv, into.dv, rows, segment)
            if into.dkv is not None and into.dnorm is not None:
                self.carry.sums.mul_(self.carry.multiplicity)
                self.carry.store(into.dkv, into.dnorm, rows)
        if self.log_g is not None and into.dlog_g is not None:
            k_dk = torch.linalg.vecdot(self.k.to(into.dk.dtype), into.dk)
            finals = (dkv, final.kv), (dnorm, final.norm)
            into.dlog_g.copy_(gate_gradient(self.log_g, None, k_dk, self.problem.degree, finals))

    def _load(self, rows: Rows, segment: Segment) -> Decay | None:
        self.work.load(self.work.keys.k, self.k, rows, segment)
        self.work.load(self.work.keys.v, self.v, rows, segment)
        return None if self.decays is None else self.decays.take(rows, segment)
