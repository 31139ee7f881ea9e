"""Power attention in plain torch: the backend of every machine."""

from longhaul.kernels.power.torch.backend import (
    backward,
    forward,
    state_backward,
    state_forward,
    step,
)

__all__ = ["backward", "forward", "state_backward", "state_forward", "step"]
