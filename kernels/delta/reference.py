"""The definition of the delta rule: the recurrence, one token at a time, in plain torch.

    S_t = Diag(e^{g_t}) S_{t−1} + β_t k_t (v_t − (Diag(e^{g_t}) S_{t−1})ᵀ k_t)ᵀ
    o_t = scale S_tᵀ q_t

Where there is no β, nothing is erased: S_t = Diag(e^{g_t}) S_{t−1} + k_t v_tᵀ.

It shares no code with the forms that are tested against it.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def delta_rule_reference(
    q: Float[Tensor, "B T G K"],
    k: Float[Tensor, "B T G K"],
    v: Float[Tensor, "B T H V"],
    beta: Float[Tensor, "B T H"] | None,
    log_g: Float[Tensor, "B T H *channels"] | None,
    initial_state: Float[Tensor, "B H K V"] | None,
    *,
    scale: float,
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "B H K V"]]:
    """Output, and the state after the last token. float64 inputs give float64 results."""
    B, T, H, V = v.shape
    G, K = k.shape[2:]
    dtype = torch.promote_types(q.dtype, torch.float32)
    out_dtype = q.dtype
    q, k = (x.to(dtype).repeat_interleave(H // G, dim=2) for x in (q, k))  # (B, T, H, K)
    v = v.to(dtype)
    state = v.new_zeros(B, H, K, V) if initial_state is None else initial_state.to(dtype)
    gates = v.new_ones(B, T, H, 1) if log_g is None else log_g.to(dtype).exp().view(B, T, H, -1)
    outputs = []
    for t in range(T):
        state = gates[:, t, :, :, None] * state
        new = v[:, t]
        if beta is not None:
            held = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
            new = beta[:, t, :, None].to(dtype) * (new - held)
        state = state + k[:, t, :, :, None] * new[:, :, None]
        outputs.append(scale * torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(outputs, dim=1).to(out_dtype), state
