"""Compile Triton kernels for chips that this machine does not have."""

from longhaul.kernels.offline.compilation import Compiled, recording, skipping

__all__ = ["Compiled", "recording", "skipping"]
