"""What a call costs, and which form and chunk length cost least. Pure functions of the sizes."""

from __future__ import annotations

from typing import Literal

from longhaul.kernels.shapes import state_features, symmetric_dim

Form = Literal["auto", "attention", "chunked", "recurrent"]

_CHUNK_SIZES = (64, 128, 256, 512)


def power_flops(
    T: int, K: int, V: int, degree: int, form: str, chunk_size: int | None = None
) -> int:
    """Useful floating-point operations of a forward pass, per head, a multiply-add counted as two.

    Chunked: 4 P V for the state (update and read-out) with the mathematical P, and 2 C (K + V)
    inside the chunk, per token. Attention: the causal half of 2 T (K + V) per token.
    """
    if form == "attention":
        return T * (T + 1) * (K + V)
    state = 4 * symmetric_dim(K, degree) * V
    if form == "recurrent":
        return T * (state + 2 * (K + V))
    if chunk_size is None:
        chunk_size = choose_chunk_size(T, K, V, degree)
    return T * (state + 2 * min(chunk_size, T) * (K + V))


def mixing_flops(T: int, K: int, V: int, degree: int) -> int:
    """Useful FLOPs per token and head, forward, of the form that `form="auto"` takes."""
    return power_flops(T, K, V, degree, choose_form(T, K, V, degree)) // T


def _seconds(T: int, K: int, V: int, degree: int, chunk_size: int) -> float:
    """Estimated time per head in arbitrary units; `chunk_size` ≥ T is the attention form."""
    C = min(chunk_size, T)
    # Reading, writing and raising a score costs about as much as 100 FLOPs of a matrix product.
    inside = T * (C + 1) / 2 * (2 * (K + V) + 100)
    if C == T:
        return inside
    P = state_features(K, degree)
    features = 2 * T * P * (2 * V + 40)
    carry = T / C * P * V * 40
    return inside + features + carry


def choose_chunk_size(T: int, K: int, V: int, degree: int) -> int:
    """The chunk length that costs least."""
    return min(_CHUNK_SIZES, key=lambda C: _seconds(T, K, V, degree, C))


def choose_form(T: int, K: int, V: int, degree: int) -> Literal["attention", "chunked"]:
    """The form that costs least for T tokens."""
    if degree > 4:
        return "attention"
    chunk_size = choose_chunk_size(T, K, V, degree)
    chunked = _seconds(T, K, V, degree, chunk_size)
    return "chunked" if chunked < _seconds(T, K, V, degree, T) else "attention"
