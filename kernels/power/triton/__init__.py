"""The Triton kernels of power attention. Imported only where they are asked for."""

from longhaul.kernels.power.triton.backend import (
    backward,
    forward,
    state_backward,
    state_forward,
    step,
    why_not,
)

__all__ = ["backward", "forward", "state_backward", "state_forward", "step", "why_not"]
