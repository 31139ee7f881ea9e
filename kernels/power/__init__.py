"""Power attention, the op of every linear variant. Read reference.py first, then README.md."""

from longhaul.kernels.power.op import power_attention, power_attention_step, power_state
from longhaul.kernels.power.state import PowerState

__all__ = ["PowerState", "power_attention", "power_attention_step", "power_state"]
