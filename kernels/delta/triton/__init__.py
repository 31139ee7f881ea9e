"""The passes in Triton, chunks of one head each: README.md, section 7."""

from longhaul.kernels.delta.triton.backend import backward, forward, why_not

__all__ = ["backward", "forward", "why_not"]
