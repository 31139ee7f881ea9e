"""What compiled.cpp does in float32 on a CPU: transposed copies, and products with φ at degree 2
whose features are never written to memory."""

from __future__ import annotations

from ctypes import CDLL, c_float, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from longhaul.kernels import native
from longhaul.kernels.power.torch.features import StateToRead


_Numbers = c_int64 * 5


@cache
def _functions() -> CDLL | None:
    functions = native.load(Path(__file__).with_name("compiled.cpp"))
    if functions is not None:
        functions.read_state.argtypes = [c_void_p] * 3 + [c_int] * 6
        functions.update_state.argtypes = [c_void_p] * 4 + [c_int] * 6
        functions.contract_state.argtypes = [c_void_p] * 4 + [c_int] * 6
        functions.copy_transposed.argtypes = [
            *[c_void_p] * 2,
            *[_Numbers] * 3,
            c_float,
            c_int,
            c_int,
        ]
    return functions


def copy_transposed(source: Tensor, target: Tensor, *, scale: float, add: bool) -> None:
    """target ← scale · source, or target += scale · source, both (n, b, h, width, tokens).

    Compiled where the width is innermost in one of them and tokens are in the other, in float32 on
    a CPU; by torch otherwise.
    """
    for x, y in ((source, target), (source.mT, target.mT)):
        if x.stride(3) == y.stride(4) == 1 and _is_float32(x) and _is_float32(y):
            functions = _functions()
            if functions is not None:
                sizes = (_Numbers(*each) for each in (x.shape, x.stride(), y.stride()))
                threads = torch.get_num_threads()
                functions.copy_transposed(x.data_ptr(), y.data_ptr(), *sizes, scale, add, threads)
                return
    if add:
        target.add_(source, alpha=scale)
        return
    target.copy_(source)
    if scale != 1:
        target.mul_(scale)


def _is_float32(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.device.type == "cpu"


def is_compiled(degree: int, like: Tensor) -> bool:
    """Whether `CompiledFeatureMap` serves tensors like this one."""
    return degree == 2 and _is_float32(like) and _functions() is not None


class CompiledFeatureMap:
    """The products of `features.FeatureMap`, by the functions of compiled.cpp.

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
