"""What a call costs, and which form and chunk length cost least. Pure functions of the sizes."""

from __future__ import annotations

from typing import Literal

from longhaul.kernels.power.attention import queries_per_block
from longhaul.kernels.shapes import padded_width, state_features, symmetric_dim, tile_width

Form = Literal["auto", "attention", "chunked", "recurrent"]

_CHUNK_SIZES = (64, 128, 256)


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


def power_backward_flops(
    T: int, K: int, V: int, degree: int, form: str, chunk_size: int | None = None
) -> int:
    """Useful floating-point operations of a backward pass, per head: 2.5 times the forward pass.

    The state takes five products of 2 P V a token for the forward pass's two: its update (it is
    rebuilt, not kept), dφ(q), dS, dv and dφ(k). A pair of tokens takes five for two as well: its
    score again, the gradient of that, dv, dq and dk; exactly 2.5 times the work where K = V.
    """
    return 5 * power_flops(T, K, V, degree, form, chunk_size) // 2


def mixing_flops(T: int, K: int, V: int, degree: int) -> int:
    """Useful FLOPs per token and head, forward, of the form that `form="auto"` takes."""
    return power_flops(T, K, V, degree, choose_form(T, K, V, degree)) // T


def choose_chunk_size(T: int, K: int, V: int, degree: int) -> int:
    """The chunk length that costs least."""
    best = _CHUNK_SIZES[0]
    # Not min(…, key=…), which torch.compile cannot trace.
    for C in _CHUNK_SIZES[1:]:
        if _chunked_cost(T, K, V, degree, C) < _chunked_cost(T, K, V, degree, best):
            best = C
    return best


def choose_form(T: int, K: int, V: int, degree: int) -> Literal["attention", "chunked"]:
    """The form that costs least for T tokens; beyond degree 4 no state pays at a useful width."""
    C = choose_chunk_size(T, K, V, degree)
    if degree > 4 or C >= T:
        return "attention"
    chunked = _chunked_cost(T, K, V, degree, C)
    return "chunked" if chunked < _inside_cost(T, K, V) else "attention"


# Cost is in microseconds per token and head, forward and backward. The numbers were fitted to the
# torch backend in float32 on two AVX-512 cores, T from 512 to 4,096 and K from 16 to 64; only their
# ratios matter here.


def _inside_cost(C: int, K: int, V: int) -> float:
    """Loading and storing, then every score that a query meets in blocks of whole tiles."""
    block = queries_per_block(C)
    keys = (C + block) / 2
    return 0.032 * (K + V) + keys * (3.0e-3 + 2.6e-5 * (K + V))


def _chunked_cost(T: int, K: int, V: int, degree: int, C: int) -> float:
    """Inside the chunk; features and their products; per chunk, the state and the calls."""
    P = state_features(K, degree)
    tile_rows = (degree - 1) * padded_width(K, degree) / tile_width(degree)
    per_chunk = 2.4e-3 * P * V + 34 * tile_rows + 100
    C = min(C, T)
    return _inside_cost(C, K, V) + 2.0e-5 * P * (V + 89) + per_chunk / C
