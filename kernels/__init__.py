"""Functions on tensors. They depend on no config, no nn.Module and no run."""

from longhaul.kernels.delta import delta_rule, delta_rule_step
from longhaul.kernels.power import (
    PowerState,
    power_attention,
    power_attention_step,
    power_state,
)
from longhaul.kernels.shapes import state_features, symmetric_dim

__all__ = [
    "PowerState",
    "delta_rule",
    "delta_rule_step",
    "power_attention",
    "power_attention_step",
    "power_state",
    "state_features",
    "symmetric_dim",
]
