"""The settings of one call, and the tensors that a backend saves for its backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class DeltaCall:
    """All settings of a call, after the chunk size is chosen."""

    scale: float
    chunk_size: int  # tokens, a power of two
    output_final_state: bool
    keeps_states: bool  # for the backward pass


class Inputs(NamedTuple):
    """The tensors of a call. Without queries only the final state is computed."""

    k: Tensor  # (B, T, G, K)
    v: Tensor  # (B, T, H, V)
    q: Tensor | None  # (B, T, G, K)
    beta: Tensor | None  # (B, T, H); None: nothing is erased
    log_g: Tensor | None  # (B, T, H) or (B, T, H, K)
    state: Tensor | None  # (S, H, K, V) of the S sequences
    cu_seqlens: Tensor | None


class Forward(NamedTuple):
    """What a forward pass returns."""

    out: Tensor | None  # (B, T, H, V) in the dtype of q
    state: Tensor | None  # (S, H, K, V) after the last token of each sequence
    kept: Tensor | None  # (groups, B, H, K, V) before each group of chunks


class Gradients(NamedTuple):
    """Gradients of the inputs; None of absent ones."""

    k: Tensor
    v: Tensor
    q: Tensor | None
    beta: Tensor | None
    log_g: Tensor | None
    state: Tensor | None
