"""The linear-cost form."""

from __future__ import annotations

from longhaul.kernels.power.reference import power_attention_reference
from longhaul.kernels.power.state import PowerState
from torch import Tensor


def power_attention_chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None,
    state: PowerState | None,
    *,
    degree: int,
    scale: float,
    normalize: bool,
    chunk_size: int,
    output_final_state: bool,
) -> tuple[Tensor, PowerState | None]:
    """The reference over the whole sequence, until the chunks are in place."""
    kv, norm = (None, None) if state is None else state
    out, kv, norm = power_attention_reference(
        q, k, v, log_g, kv, norm, degree=degree, scale=scale, normalize=normalize
    )
    return out, PowerState(kv, norm)
