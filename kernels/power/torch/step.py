"""The recurrent form: one token at a time at constant cost, for decoding."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from longhaul.kernels.power.state import (
    PowerState,
    denominator_floor,
    query_unit,
    scales_rows,
    state_size,
)
from longhaul.kernels.power.torch.features import expand, multiplicity


def recurrent_step(
    state: PowerState,
    q: Float[Tensor, "B H K"],
    k: Float[Tensor, "B G K"],
    v: Float[Tensor, "B G V"],
    log_g: Float[Tensor, "B G"] | None,
    *,
    degree: int,
    scale: float,
    normalize: bool,
    inplace: bool = False,
) -> tuple[Float[Tensor, "B H V"], PowerState]:
    """Update the state, S_t = γ_t S_{t−1} + φ(k_t) v_tᵀ, and read it, eqs. (9) and (10).

    The token's weight for itself is (q·k)^p rather than φ(q)·φ(k), which would cancel digits. In
    place, `state` is overwritten and returned, and nothing can be differentiated.
    """
    G = k.shape[1]
    kv, norm = state
    if log_g is not None:
        gate = log_g.exp()[..., None]  # (B, G, 1)
        if inplace:
            kv.mul_(gate[..., None])
            norm.mul_(gate)
        else:
            kv, norm = kv * gate[..., None], norm * gate
    q_group = scale * q.unflatten(1, (G, -1))  # (B, G, R, K)
    if scales_rows(degree, normalize):
        q_group = q_group / query_unit(q_group, dim=-1)
    q_features = expand(q_group, degree) * multiplicity(q.shape[-1], degree, q)  # (B, G, R, P)
    own = torch.einsum("bgrk,bgk->bgr", q_group, k) ** degree  # (B, G, R)
    out = q_features @ kv + own[..., None] * v[:, :, None]  # (B, G, R, V)
    if normalize:
        denominator = (q_features @ norm[..., None])[..., 0] + own  # (B, G, R)
        with torch.no_grad():
            state_norm = state_size(norm, multiplicity(q.shape[-1], degree, q))
            query_norm = (q_group**2).sum(-1) ** (degree / 2)
            floor = denominator_floor(degree, query_norm, state_norm, q.dtype)
            size = denominator.abs() if degree % 2 else denominator
        out = out / torch.where(size < floor, floor, denominator)[..., None]
    k_features = expand(k, degree)  # (B, G, P)
    if inplace:
        kv.addcmul_(k_features[..., None], v[:, :, None])
        norm.add_(k_features)
        return out.flatten(1, 2), state
    after = PowerState(torch.addcmul(kv, k_features[..., None], v[:, :, None]), norm + k_features)
    return out.flatten(1, 2), after


def power_attention_recurrent(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T G K"],
    v: Float[Tensor, "B T G V"],
    log_g: Float[Tensor, "B T G"] | None,
    initial_state: PowerState,
    *,
    degree: int,
    scale: float,
    normalize: bool,
) -> tuple[Float[Tensor, "B T H V"], PowerState]:
    """`recurrent_step` over T. Autograd saves one state per token, so this is for short T."""
    state = initial_state
    outputs = []
    for t in range(q.shape[1]):
        out, state = recurrent_step(
            state,
            q[:, t],
            k[:, t],
            v[:, t],
            None if log_g is None else log_g[:, t],
            degree=degree,
            scale=scale,
            normalize=normalize,
        )
        outputs.append(out)
    return torch.stack(outputs, dim=1), state
