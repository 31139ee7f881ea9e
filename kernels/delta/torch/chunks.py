"""Forward and backward of some chunks of all rows: README.md, sections 2 and 4.

X are the chunks of all rows, (M chunks × R rows) flattened. Names follow the equations.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from longhaul.kernels.delta.torch.decays import ChannelDecays, ScalarDecays
from longhaul.kernels.delta.torch.inverse import unit_lower_inverse


class Loaded(NamedTuple):
    """Inputs of the chunks, (X, C, D)."""

    k: Tensor
    v: Tensor
    q: Tensor | None  # times the scale
    beta: Tensor | None  # D = 1
    log_g: Tensor  # D = 1 or K


class LoadedGradients(NamedTuple):
    """Gradients of `Loaded`."""

    k: Tensor
    v: Tensor
    q: Tensor | None
    beta: Tensor | None
    log_g: Tensor


class Chunks:
    """All of some chunks that depends on no state, and the walk of the state through them."""

    def __init__(self, inputs: Loaded, num_chunks: int) -> None:
        k, v, q, beta, log_g = self.inputs = inputs
        self.num_chunks = num_chunks
        self.decays = ScalarDecays(log_g) if log_g.shape[2] == 1 else ChannelDecays(log_g)
        self.k_end = self.decays.to_end * k
        self.total = self._per_chunk(self.decays.total).mT  # (M, R, 1 or K, 1)
        if q is not None:
            self.q_start = self.decays.from_start * q
            self.p = self.decays.scores(q, k)
        self.u = v
        if beta is not None:
            self.k_start = self.decays.from_start * k
            self.a = self.decays.scores(k, k)  # without β
            self.inverse = unit_lower_inverse(beta * self.a)
            self.u = torch.bmm(self.inverse, beta * v)
            self.w = torch.bmm(self.inverse, beta * self.k_start)

    def walk(self, state: Tensor, *, keeps_states: bool) -> Tensor:
        """Carry the state (R, K, V) through the chunks, eqs. (7) and (8); returns it after them.

        Sets the new values (X, C, V), and the states before the chunks (X, K, V) if they are kept.
        """
        erases = self.inputs.beta is not None
        k_end, u, new = (self._per_chunk(x) for x in (self.k_end, self.u, torch.empty_like(self.u)))
        states = state.new_empty(self.num_chunks if keeps_states else 0, *state.shape)
        for m in range(self.num_chunks):
            if keeps_states:
                states[m] = state
            added = u[m]
            if erases:
                torch.baddbmm(u[m], self._per_chunk(self.w)[m], state, alpha=-1, out=new[m])
                added = new[m]
            state = torch.baddbmm(self.total[m] * state, k_end[m].mT, added)
        self.new = new.flatten(0, 1) if erases else self.u
        self.states = states.flatten(0, 1)
        return state

    def read(self) -> Tensor:
        """The output (X, C, V), eq. (9), after a walk that kept the states."""
        return torch.baddbmm(torch.bmm(self.p, self.new), self.q_start, self.states)

    def backward(self, dout: Tensor | None, dstate: Tensor) -> tuple[LoadedGradients, Tensor]:
        """Gradients of the inputs, and of the state before the chunks, after a walk.

        Args:
            dout: gradient of `read` (X, C, V).
            dstate: gradient of the state after the chunks, (R, K, V).
        """
        k, v, q, beta, _ = self.inputs
        decays, states = self.decays, self.states
        dnew, dstates, dstate = self._walk_back(dout, dstate)
        dk_end = torch.bmm(self.new, dstates.mT)
        dk = decays.to_end * dk_end
        gate_start = torch.zeros_like(k)
        dq = None
        if q is not None and dout is not None:
            dscores, dq_start = torch.bmm(dout, self.new.mT).tril_(), torch.bmm(dout, states.mT)
            dq, dk_scores = decays.scores_backward(dscores, q, k, self.p)
            dq += decays.from_start * dq_start
            dk += dk_scores
            gate_start += dq_start.mul_(self.q_start)
        dv, dbeta = dnew, None
        if beta is not None:
            x_v = torch.bmm(self.inverse.mT, dnew)
            x_k = torch.bmm(self.inverse.mT, torch.bmm(dnew, states.mT).neg_())
            da = torch.bmm(x_v, self.u.mT).baddbmm_(x_k, self.w.mT).neg_().tril_(-1)
            dbeta = (da * self.a).sum(dim=2, keepdim=True)
            dbeta += (x_v * v).sum(dim=2, keepdim=True)
            dbeta += (x_k * self.k_start).sum(dim=2, keepdim=True)
            dv, dk_start = x_v.mul_(beta), x_k.mul_(beta)
            dk_rows, dk_columns = decays.scores_backward(da.mul_(beta), k, k, self.a)
            dk += dk_rows.add_(dk_columns)
            dk += decays.from_start * dk_start
            gate_start += dk_start.mul_(self.k_start)
        dtotal = (states * dstates).sum(dim=2)[:, None] * decays.total
        dlog_g = decays.gate_gradient(gate_start, dk_end.mul_(self.k_end), dtotal)
        return LoadedGradients(dk, dv, dq, dbeta, dlog_g), dstate

    def _walk_back(self, dout: Tensor | None, dstate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Carry the gradient of the state back through the chunks, eqs. (11) and (12).

        Returns the gradients of the new values (X, C, V), of the states after the chunks (X, K, V),
        and of the state before them.
        """
        dnew = torch.zeros_like(self.u) if dout is None else torch.bmm(self.p.mT, dout)
        read = None if dout is None else self._per_chunk(torch.bmm(self.q_start.mT, dout))
        dnew, k_end = self._per_chunk(dnew), self._per_chunk(self.k_end)
        dstates = dstate.new_empty(self.num_chunks, *dstate.shape)
        for m in reversed(range(self.num_chunks)):
            dstates[m] = dstate
            dnew[m].baddbmm_(k_end[m], dstate)
            dstate = self.total[m] * dstate
            if read is not None:
                dstate += read[m]
            if self.inputs.beta is not None:
                dstate.baddbmm_(self._per_chunk(self.w)[m].mT, dnew[m], alpha=-1)
        return dnew.flatten(0, 1), dstates.flatten(0, 1), dstate

    def _per_chunk(self, x: Tensor) -> Tensor:
        """(X, …) as (M, R, …)."""
        return x.unflatten(0, (self.num_chunks, -1))  # type: ignore[no-any-return]
