"""What a stretch of tokens does to a state.

Over any stretch the state after it is M S + E with S the state before it: README.md, section 6.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from longhaul.kernels.backend import Backend
from longhaul.kernels.delta.checks import check_tensors
from longhaul.kernels.delta.op import state_alone


def delta_summary(
    k: Float[Tensor, "B T G K"],
    v: Float[Tensor, "B T H V"],
    beta: Float[Tensor, "B T H"] | None,
    log_g: Float[Tensor, "B T H *channels"] | None = None,
    *,
    chunk_size: int | None = None,
    backend: Backend = "auto",
) -> tuple[Float[Tensor, "B H K K"], Float[Tensor, "B H K V"]]:
    """M and E with S_after = M S_before + E, for all tokens of the call.

    A gate of 0 within them makes M exactly 0: so documents need no case of their own.

    Args, Raises: as for `delta_rule`.
    """
    check_tensors(k, k, v, beta, log_g)
    K, V = k.shape[3], v.shape[3]
    # Columns of a state know nothing of each other. Those of values 0 that start from I end as M.
    start = torch.eye(K, dtype=torch.promote_types(k.dtype, torch.float32), device=k.device)
    start = F.pad(start, (V, 0)).expand(v.shape[0], v.shape[2], K, V + K)
    after = state_alone(
        k, F.pad(v, (0, K)), beta, log_g, start, chunk_size=chunk_size, backend=backend
    )
    return after[..., V:], after[..., :V]
