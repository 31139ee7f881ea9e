"""The delta rule, the op of DeltaNet, Gated DeltaNet and KDA, and of GLA. Read reference.py first,
then README.md."""

from longhaul.kernels.delta.op import delta_rule, delta_rule_step
from longhaul.kernels.delta.summary import delta_summary

__all__ = ["delta_rule", "delta_rule_step", "delta_summary"]
