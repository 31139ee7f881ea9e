"""φ at degree 2 in float32 on a CPU: products whose features are never written to memory."""

from __future__ import annotations

from ctypes import CDLL, c_int, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from longhaul.kernels import native
from longhaul.kernels.power.torch.features import StateToRead


@cache
def _functions() -> CDLL | None:
    functions = native.load(Path(__file__).with_name("features.cpp"))
    if functions is not None:
        for name in ("read_state", "update_state", "contract_state"):
            function = getattr(functions, name)
            pointers = 3 if name == "read_state" else 4
            function.argtypes = [c_void_p] * pointers + [c_int] * 6
            function.restype = None
    return functions


def is_compiled(degree: int, like: Tensor) -> bool:
    """Whether `CompiledFeatureMap` serves tensors like this one."""
    serves = degree == 2 and like.dtype == torch.float32 and like.device.type == "cpu"
    return serves and _functions() is not None


class CompiledFeatureMap:
    """The products of `features.FeatureMap`, by the functions of features.cpp.

    All tensors are contiguous, and states are without the multiplicity of their features.
    """

    def __init__(self, x: Tensor, dx: Tensor) -> None:
        self._x, self._dx = x, dx
        self._all_of_state = x.new_ones(len(x))

    def read(self, read: StateToRead, out: Tensor) -> None:
        """Write (multiplicity · state) φ(x), (rows, V + 1, tokens)."""
        self._call("read_state", read.state, self._x, out)

    def add_to(self, state: Tensor, values: Tensor, keep: Tensor | float) -> None:
        """state ← keep · state + values φ(x)ᵀ; keep is (rows, 1, 1), 1 or 0."""
        if not isinstance(keep, Tensor):
            keep = self._all_of_state if keep else torch.zeros_like(self._all_of_state)
        self._call("update_state", state, self._x, values, keep.contiguous())

    def contract(self, read: StateToRead, values: Tensor) -> None:
        """Add to dx the gradient of Σ values · (multiplicity · state) φ(x)."""
        self._call("contract_state", read.state, values, self._x, self._dx)

    def _call(self, name: str, state: Tensor, *tensors: Tensor) -> None:
        assert all(x.is_contiguous() for x in (state, *tensors)), name
        rows, V, P = state.shape
        K, tokens = self._x.shape[1:]
        function = getattr(_functions(), name)
        pointers = (x.data_ptr() for x in (state, *tensors))
        function(*pointers, rows, V, K, tokens, P, torch.get_num_threads())
