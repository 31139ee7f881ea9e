"""The Triton backend of power attention. Imported only when a call uses it."""

from longhaul.kernels.power.triton.backend import (
    backward,
    forward,
    state_backward,
    state_forward,
    step,
    why_not,
)

__all__ = ["backward", "forward", "state_backward", "state_forward", "step", "why_not"]
