"""Rotation of pairs of coordinates, in one pass forward and one backward."""

from longhaul.kernels.rotary.op import rotate

__all__ = ["rotate"]
