"""The recurrent form: one token at a time at constant cost, for decoding."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def step(
    state: Float[Tensor, "B H K V"],
    q: Float[Tensor, "B G K"],
    k: Float[Tensor, "B G K"],
    v: Float[Tensor, "B H V"],
    beta: Float[Tensor, "B H"] | None,
    log_g: Float[Tensor, "B H *channels"] | None,
    *,
    scale: float,
    inplace: bool = False,
) -> tuple[Float[Tensor, "B H V"], Float[Tensor, "B H K V"]]:
    """Update the state and read it, eqs. (1) and (2), all in the dtype of the state.

    In place, `state` is overwritten and returned, and nothing can be differentiated.
    """
    B, H = state.shape[:2]
    q, k = (x if x.shape[1] == H else x.repeat_interleave(H // x.shape[1], dim=1) for x in (q, k))
    if log_g is not None:
        gate = log_g.exp().view(B, H, -1, 1)
        state = state.mul_(gate) if inplace else state * gate
    if beta is not None:
        held = (k[:, :, None] @ state)[:, :, 0]  # (B, H, V)
        v = beta[..., None] * (v - held)
    column, row = k[..., None], v[:, :, None]
    state = state.addcmul_(column, row) if inplace else torch.addcmul(state, column, row)
    return (scale * q[:, :, None] @ state)[:, :, 0], state


def delta_rule_recurrent(
    q: Float[Tensor, "B T G K"],
    k: Float[Tensor, "B T G K"],
    v: Float[Tensor, "B T H V"],
    beta: Float[Tensor, "B T H"] | None,
    log_g: Float[Tensor, "B T H *channels"] | None,
    initial_state: Float[Tensor, "B H K V"] | None,
    *,
    scale: float,
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "B H K V"]]:
    """`step` over T, differentiable. Autograd saves one state per token: for short T."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    out_dtype = q.dtype
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    beta, log_g = (None if x is None else x.to(dtype) for x in (beta, log_g))
    state = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3])
    if initial_state is not None:
        state = initial_state.to(dtype)
    outputs = []
    for t in range(q.shape[1]):
        out, state = step(
            *(state, q[:, t], k[:, t], v[:, t]),
            None if beta is None else beta[:, t],
            None if log_g is None else log_g[:, t],
            scale=scale,
        )
        outputs.append(out)
    return torch.stack(outputs, dim=1).to(out_dtype), state
