"""The torch backend of the delta rule, which runs on every device."""

from longhaul.kernels.delta.torch.backend import backward, forward
from longhaul.kernels.delta.torch.grid import num_kept
from longhaul.kernels.delta.torch.step import delta_rule_recurrent, step

__all__ = ["backward", "delta_rule_recurrent", "forward", "num_kept", "step"]
