"""The activation of the MLP, in one pass forward and one backward."""

from longhaul.kernels.gelu.op import gelu

__all__ = ["gelu"]
