"""Functions on tensors. Nothing here knows a config, a module or a logger."""

from longhaul.kernels.power import (
    PowerState,
    power_attention,
    power_attention_step,
    power_state,
)
from longhaul.kernels.shapes import state_features, symmetric_dim

__all__ = [
    "PowerState",
    "power_attention",
    "power_attention_step",
    "power_state",
    "state_features",
    "symmetric_dim",
]
