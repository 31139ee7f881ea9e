"""Compile Triton kernels for chips that this machine does not have."""

from longhaul.kernels.offline.compilation import recording, skipping

__all__ = ["recording", "skipping"]
