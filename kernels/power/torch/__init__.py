"""The torch backend of power attention, which runs on every device."""

from longhaul.kernels.power.torch.backend import (
    backward,
    forward,
    state_backward,
    state_forward,
    step,
)

__all__ = ["backward", "forward", "state_backward", "state_forward", "step"]
