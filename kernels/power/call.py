"""The settings of one call, and the tensors that a backend saves for its backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class PowerCall:
    """All settings of a call, after form and chunk size are chosen."""

    degree: int
    scale: float
    normalize: bool
    output_final_state: bool
    form: Literal["attention", "chunked"]
    chunk_size: int  # tokens; in the attention form those of the longest sequence
    keeps_states: bool = False  # for the backward pass, which otherwise computes them again


class Forward(NamedTuple):
    """What a forward pass returns. Only `out` is never None."""

    out: Tensor  # (B, T, H, V) in the dtype of q
    kv: Tensor | None  # (S, G, P, V) after the last token of each of the S sequences
    norm: Tensor | None  # (S, G, P)
    inverse: Tensor | None  # (B, T, H) den^(−1), or den^(−1/p): see README.md, 6
    is_live: Tensor | None  # (B, T, H) whether the denominator was above its floor
    chunk_kv: Tensor | None = None  # (chunks, G, P, V) before each chunk, if the call keeps states
    chunk_norm: Tensor | None = None  # (chunks, G, P); (0,) where there is no denominator


class Saved(NamedTuple):
    """Saved for backward: inputs, output, denominators, perhaps states. Scores are recomputed."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_g: Tensor | None
    kv: Tensor | None
    norm: Tensor | None
    cu_seqlens: Tensor | None
    out: Tensor
    final_kv: Tensor | None
    final_norm: Tensor | None
    inverse: Tensor | None
    is_live: Tensor | None
    chunk_kv: Tensor | None = None
    chunk_norm: Tensor | None = None


Grads = tuple[
    Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None
]


class SavedState(NamedTuple):
    """Saved for the backward of a state alone: inputs, and the final state for the gates."""

    k: Tensor
    v: Tensor
    log_g: Tensor | None
    kv: Tensor | None
    norm: Tensor | None
    cu_seqlens: Tensor | None
    final_kv: Tensor
    final_norm: Tensor


StateGrads = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]
