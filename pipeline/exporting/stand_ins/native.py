"""Stands in for longhaul.kernels.native: an exported model compiles nothing."""

from pathlib import Path

from torch import Tensor


def serves(*tensors: Tensor) -> bool:
    return False


def load(source: Path) -> None:
    return None
