"""The cross-entropy of rows of logits, with its gradient in place of the logits."""

from longhaul.kernels.cross_entropy.op import cross_entropy_, softcapped

__all__ = ["cross_entropy_", "softcapped"]
