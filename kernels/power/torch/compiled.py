"""What torch does slowly in float32 on a CPU, in C++: transposed copies, at degrees 1 and 2
attention inside chunks, at degree 2 products with φ; and the attention form as a whole
(attention_form.py)."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import CDLL, c_float, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from longhaul.kernels import native
from longhaul.kernels.power.torch.features import StateToRead

_Numbers = c_int64 * 5


@cache
def _load() -> CDLL | None:
    functions = native.load(Path(__file__).with_name("compiled.cpp"))
    if functions is not None:
        functions.read_and_update.argtypes = [c_void_p] * 7 + [c_int] * 11
        functions.contract_state.argtypes = [c_void_p] * 4 + [c_int] * 6
        functions.attend.argtypes = [c_void_p] * 5 + [c_int] * 8
        functions.attend_backward.argtypes = [c_void_p] * 8 + [c_int] * 9
        functions.attention_form.argtypes = [c_void_p] * 8 + [c_int]
        functions.attention_form_backward.argtypes = [c_void_p] * 14 + [c_int]
        functions.gated_sums.argtypes = [c_void_p] * 8 + [c_int]
        functions.gated_sums_backward.argtypes = [c_void_p] * 13 + [c_int]
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
        if x.stride(3) == y.stride(4) == 1 and native.serves(x, y):
            compiled = _load()
            if compiled is not None:
                sizes = (_Numbers(*each) for each in (x.shape, x.stride(), y.stride()))
                threads = torch.get_num_threads()
                compiled.copy_transposed(x.data_ptr(), y.data_ptr(), *sizes, scale, add, threads)
                return
    if add:
        target.add_(source, alpha=scale)
        return
    target.copy_(source)
    if scale != 1:
        target.mul_(scale)


def attends(degree: int, like: Tensor) -> bool:
    """Whether `attend` and `attend_backward` serve tensors like this one."""
    return degree in (1, 2) and native.serves(like) and _load() is not None


def maps_features(degree: int, like: Tensor) -> bool:
    """Whether `read_and_update` and `CompiledFeatureMap` serve tensors like this one."""
    return degree == 2 and attends(degree, like)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    num: Tensor,
    degree: int,
    rows: int,
    has_past: bool,
) -> None:
    """Write the numerators and denominators (items, V + 1, tokens) of attention inside chunks.

    q, k and v are (items, K or V + 1, tokens), log decays (items, 1, tokens) in float64. Items are
    blocks of tokens of `rows` rows, sorted by blocks; with a past, each meets all blocks before it.
    """
    tensors = _pointers(q, k, v, log_decay, num)
    sizes = degree, len(q), rows, has_past, v.shape[1], *q.shape[1:]
    functions().attend(*tensors, *sizes, torch.get_num_threads())


def attend_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    dnum: Tensor,
    into: tuple[Tensor, Tensor, Tensor],
    degree: int,
    rows: int,
    has_past: bool,
    *,
    adds: bool,
) -> None:
    """Write dq, and write or add to dk and dv, from the gradients of what `attend` writes."""
    tensors = _pointers(q, k, v, log_decay, dnum, *into)
    sizes = degree, len(q), rows, has_past, v.shape[1], *q.shape[1:]
    functions().attend_backward(*tensors, adds, *sizes, torch.get_num_threads())


def functions() -> CDLL:
    """The compiled functions, where `attends`."""
    compiled = _load()
    assert compiled is not None
    return compiled


def _pointers(*tensors: Tensor | None) -> list[int | None]:
    assert all(x is None or x.is_contiguous() for x in tensors)
    return [None if x is None else x.data_ptr() for x in tensors]


def read_and_update(
    state: Tensor,
    queries: Sequence[tuple[Tensor, Tensor]],
    norms: Tensor | None,
    keys: tuple[Tensor, Tensor] | None,
    keep: Tensor | None,
    *,
    is_zero: bool,
    chunks: int,
    updates: int,
) -> None:
    """Read a state (rows, V + 1, P) before each of some chunks, and update it with the first ones.

    Tensors of queries and keys have as many blocks of tokens for every chunk.

    Args:
        queries: pairs of q (blocks, rows, K, tokens) and where to write (multiplicity · state)
            φ(q), (blocks, rows, V + 1, tokens).
        norms: where to write the last row of the state before each chunk, (chunks, rows, 1, P).
        keys: k (blocks, rows, K, tokens) and values (blocks, rows, V + 1, tokens).
        keep: what the state is multiplied by before each chunk is added, (chunks, rows, 1, 1).
        is_zero: the state is zero, and its memory may be uninitialised.
        updates: number of chunks that are added.
    """
    rows, V, P = state.shape
    blocks, _, K, C = (keys or queries[0])[0].shape
    read, written = zip(*queries, strict=True) if queries else ((), ())
    pointers = c_void_p * len(queries)
    functions().read_and_update(
        *_pointers(state),
        pointers(*_pointers(*read)),
        pointers(*_pointers(*written)),
        *_pointers(norms, *(keys or (None, None)), keep),
        is_zero,
        len(queries),
        chunks,
        blocks // chunks,
        updates,
        *(rows, V, K, C, P),
        torch.get_num_threads(),
    )


class CompiledFeatureMap:
    """The products of `features.TorchFeatureMap`, by the functions of features.h.

    All tensors are contiguous, and states are without the multiplicity of their features.
    """

    def __init__(self, x: Tensor, dx: Tensor) -> None:
        self._x, self._dx = x, dx

    def read(self, read: StateToRead, out: Tensor) -> None:
        """Write (multiplicity · state) φ(x), (rows, V + 1, tokens)."""
        query = self._x[None], out[None]
        read_and_update(read.state, [query], None, None, None, is_zero=False, chunks=1, updates=0)

    def add_to(self, state: Tensor, values: Tensor, keep: Tensor | float) -> None:
        """state ← keep · state + values φ(x)ᵀ; keep is (rows, 1, 1), 1 or 0."""
        keys = self._x[None], values[None]
        is_zero = not isinstance(keep, Tensor) and keep == 0
        total = keep[None].contiguous() if isinstance(keep, Tensor) else None
        read_and_update(state, [], None, keys, total, is_zero=is_zero, chunks=1, updates=1)

    def contract(self, read: StateToRead, values: Tensor) -> None:
        """Add to dx the gradient of Σ values · (multiplicity · state) φ(x)."""
        rows, V, P = read.state.shape
        tensors = _pointers(read.state, values, self._x, self._dx)
        sizes = rows, V, *self._x.shape[1:], P
        functions().contract_state(*tensors, *sizes, torch.get_num_threads())
