"""A call on a part of each sequence: between its two collectives lies a state of other processes.

Autograd sees two nodes around `state_before`. In the backward pass the later one, which comes
first, computes only the gradient of the state before the part. Then `state_before` returns the
gradient of the state that the part leaves, and the earlier node computes all gradients of tokens,
once, from this and from the gradient of the output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from longhaul.kernels.power import library
from longhaul.kernels.power.call import PowerCall
from longhaul.kernels.power.state import PowerState


def run_part(
    call: PowerCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None,
    state_before: Callable[[PowerState, Tensor], PowerState],
    *,
    backend: str,
) -> Tensor:
    """The output for the tokens of a part; op.py says what `state_before` is."""
    part = _Part(call, backend)
    own_kv, own_norm, link = _OwnState.apply(part, q, k, v, log_g)  # type: ignore[no-untyped-call]
    tokens = [None if x is None else x.detach() for x in (q, k, v, log_g)]
    decay = torch.ones_like(own_norm[:, :, 0])
    if log_g is not None:
        # Log gates are summed in float64, because the sums run over a whole part.
        decay = log_g.detach().double().sum(dim=1).exp().to(decay.dtype)
    kv, norm = state_before(PowerState(own_kv, own_norm), decay)
    return _Output.apply(part, link, *tokens, kv, norm)  # type: ignore[no-any-return, no-untyped-call]


class _Part:
    """What the two nodes have in common."""

    def __init__(self, call: PowerCall, backend: str) -> None:
        self.settings = library.settings_of(call, backend)
        self.saved: tuple[Tensor | None, ...] | None = None
        """From one node's backward to the other's: what the forward pass has saved."""


class _OwnState(torch.autograd.Function):
    """The state that the tokens leave when they start from zero."""

    @staticmethod
    def forward(
        ctx: Any, part: _Part, q: Tensor, k: Tensor, v: Tensor, log_g: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.part = part
        settings = {name: part.settings[name] for name in ("degree", "chunk_size", "backend")}
        kv, norm = library.power_state(k, v, log_g, None, None, None, **settings)
        # The gradient of the output comes as that of a tensor of its shape, without memory.
        return kv, norm, q.new_zeros(()).expand(*q.shape[:3], v.shape[3])

    @staticmethod
    def backward(
        ctx: Any, dkv: Tensor | None, dnorm: Tensor | None, dout: Tensor
    ) -> tuple[Tensor | None, ...]:
        part = ctx.part
        saved, part.saved = part.saved, None
        needs = ctx.needs_input_grad[1:]
        gradients = library.power_backward(
            *saved, dout, dkv, dnorm, needs=[*needs, False, False], **part.settings
        )
        return None, *(x if need else None for x, need in zip(gradients[:4], needs, strict=True))


class _Output(torch.autograd.Function):
    """The output, from the state before the part. The tokens' gradients are the other node's."""

    @staticmethod
    def forward(
        ctx: Any,
        part: _Part,
        link: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_g: Tensor | None,
        kv: Tensor,
        norm: Tensor,
    ) -> Tensor:
        ctx.part = part
        inputs = q, k, v, log_g, kv, norm, None
        out, *others = library.power_forward(*inputs, **part.settings)
        ctx.save_for_backward(*inputs, out, *others)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        part = ctx.part
        part.saved = ctx.saved_tensors
        needs = [False] * 4 + [True] * 2
        *_, dkv, dnorm = library.power_backward(
            *part.saved, dout, None, None, needs=needs, **part.settings
        )
        return None, dout, None, None, None, None, dkv, dnorm
