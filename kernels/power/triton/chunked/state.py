"""States before chunks and gradients of states after them, in one of two ways.

The same kernels compute the states S of the forward pass, eq. (9), and their gradients dS,
eq. (13), from other tokens with other weights and in the other direction of time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from longhaul.kernels.power.triton.chunked.scan import scan
from longhaul.kernels.power.triton.chunked.sums import Sums, chunk_sums, norm_sums
from longhaul.kernels.power.triton.chunked.walk import num_programs, walk
from longhaul.kernels.power.triton.launch import forced_candidate


class States(NamedTuple):
    """One state per chunk: the state before the chunk, or the gradient of the state after it."""

    kv: Tensor  # (chunks, G, P, V) in the dtype of the products that read it
    norm: Tensor  # (chunks, G, P) float32; empty if no denominator is needed


# One and a half for each multiprocessor of an H100. With fewer, summing and scanning is faster, as
# docs/kernels.md estimates.
_ENOUGH_PROGRAMS = 192


def _walks(sums: Sums, *, is_packed: bool) -> bool:
    """Whether programs walk through sequences, rather than sum chunks in parallel and scan.

    Beyond degree 2 they would also carry the norm, for which registers are too few. Of packed
    documents one may be as long as all of them, so they count as one sequence.
    """
    if sums.degree > 2:
        return False
    candidate = forced_candidate()
    if candidate is not None:
        return candidate > 0
    sequences = 1 if is_packed else len(sums.chunks.sequences)
    return num_programs(sums, sequences) >= _ENOUGH_PROGRAMS


def accumulate(
    sums: Sums,
    read_dtype: torch.dtype,
    initial: tuple[Tensor | None, Tensor | None],
    final: tuple[Tensor | None, Tensor | None],
    other: States | None,
    *,
    is_packed: bool,
    has_norm: bool,
) -> tuple[States, Tensor | None]:
    """The decayed sums before each chunk or, in reverse, after each chunk.

    Args:
        read_dtype: dtype of the result, the norm apart, which is float32 like all sums.
        initial: states (S, G, P, V) and (S, G, P) at the start of every sequence, in reverse
            gradients at its end; None means zero.
        final: filled with what is carried to the other end; both or neither are given.
        other: in reverse, the states before each chunk. Then the second result is the product of
            sum and state at the end of each chunk, (chunks, G) float64, for eq. (19).
    """
    needs_all = final[0] is not None
    others: tuple[Tensor | None, Tensor | None] = (None, None) if other is None else other
    if _walks(sums, is_packed=is_packed):
        kv, products = walk(sums, read_dtype, initial[0], final[0], others[0])
        norm = norm_sums(sums, needs_all=needs_all) if has_norm else kv.new_empty(0)
    else:
        parts, norm = chunk_sums(sums, has_norm=has_norm, needs_all=needs_all)
        kv, products = scan(parts, sums, read_dtype, initial[0], final[0], others[0])
        del parts
    if has_norm:
        norm, more = scan(norm, sums, torch.float32, initial[1], final[1], others[1])
        products = None if products is None or more is None else products + more
    return States(kv, norm), products
