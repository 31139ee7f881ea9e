"""States before chunks, eq. (9), and gradients of states after them, eq. (13), in one of two ways.

Both are decayed sums, of other tokens with other weights and in the other direction of time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from longhaul.kernels.common.triton.launch import forced_candidate
from longhaul.kernels.power.triton.chunked.scan import scan
from longhaul.kernels.power.triton.chunked.sums import Sums, chunk_sums, norm_sums
from longhaul.kernels.power.triton.chunked.walk import walk


class States(NamedTuple):
    """One state per chunk: the state before the chunk, or the gradient of the state after it."""

    kv: Tensor  # (chunks, G, P, V) in the dtype of the products that read it
    norm: Tensor  # (chunks, G, P) float32; empty if no denominator is needed


# Programs that walk on an H100 at a time, two on each multiprocessor; and how many of them must be
# there on average, as docs/kernels.md estimates for bfloat16. Other chips and dtypes follow it.
_AT_A_TIME = 264
_WANTED = 192


def read_dtype(x: Tensor) -> torch.dtype:
    """The dtype of states beside tokens x: that of the products which read them."""
    return torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32


def _walks(sums: Sums) -> bool:
    """Whether programs walk through sequences, rather than sum chunks in parallel and scan.

    Beyond degree 2 products of four coordinates leave no registers for the running sum of a block
    beside that of a chunk. Of packed documents one may be as long as all of them, so they count as
    one sequence.
    """
    if sums.degree > 2:
        return False
    candidate = forced_candidate()
    if candidate is not None:
        return candidate > 0
    sequences = 1 if sums.chunks.is_packed else len(sums.chunks.sequences)
    programs = sequences * sums.tiles.num_blocks * sums.v_blocks * sums.G
    return bool(programs >= _WANTED * triton.cdiv(programs, _AT_A_TIME))


def accumulate(
    sums: Sums,
    initial: tuple[Tensor | None, Tensor | None],
    final: tuple[Tensor | None, Tensor | None],
    other: States | None,
    *,
    has_norm: bool,
) -> tuple[States, Tensor | None]:
    """The decayed sums before each chunk or, in reverse, after each chunk.

    Args:
        initial: states (S, G, P, V) and (S, G, P) at the start of every sequence, in reverse
            gradients at its end; None means zero.
        final: filled with what is carried to the other end; both or neither are given.
        other: in reverse, the states before each chunk. Then the second result is the product of
            sum and state at the end of each chunk, (chunks, G) float64, for eq. (19).
    """
    dtype, needs_all = read_dtype(sums.tokens.x), final[0] is not None
    others: tuple[Tensor | None, Tensor | None] = (None, None) if other is None else other
    # At degree 1 and 2 the norm has sums of its own.
    has_features = has_norm and sums.degree > 2
    if _walks(sums):
        kv, products = walk(sums, dtype, initial[0], final[0], others[0])
        norm = kv.new_empty(0, dtype=torch.float32)
    else:
        parts, norm = chunk_sums(sums, has_norm=has_features, needs_all=needs_all)
        kv, products = scan(parts, sums, dtype, initial[0], final[0], others[0])
    if has_norm:
        if not has_features:
            norm = norm_sums(sums, needs_all=needs_all)
        norm, more = scan(norm, sums, torch.float32, initial[1], final[1], others[1])
        products = None if products is None or more is None else products + more
    return States(kv, norm), products
