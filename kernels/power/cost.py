"""The cost of a call, and the form and chunk size with the lowest cost, from the sizes alone."""

from __future__ import annotations

from typing import Literal, NamedTuple

from longhaul.kernels.shapes import state_features, symmetric_dim

Form = Literal["auto", "attention", "chunked", "recurrent"]


class Coefficients(NamedTuple):
    """Coefficients of the time of one head, forward and backward, in microseconds."""

    token: float  # per token and unit of K + V: reading and writing
    pair: float  # per pair of tokens in a chunk: decay, power, mask
    pair_product: float  # per pair and unit of K + V: matrix products
    feature: float  # per token and feature: building it and its gradient
    feature_product: float  # per token, feature and unit of V: products with states
    state: float  # per chunk and entry of the P × V state: writing, scanning, reading
    chunk: float  # per chunk: starting operations
    block: int  # queries that are scored at a time
    chunk_sizes: tuple[int, ...]  # tokens


# Only ratios matter. The coefficients of "torch" were fitted to the torch backend at degree 2 in
# float32 on two AVX-512 cores, with T from 512 to 4,096 and K from 16 to 64, except that of states,
# which is lower than fitted: chunks of 128 were faster at K = 64, by 5 to 20 %, and of 512 at K =
# 128, by 2 to 8 %. Several chunks of 128 are processed at once, and 256 was slower. Those of
# features lie between that fit, by which the forms cross at 5,440 tokens for K = 64, and a core
# with AVX2, where they cross at 4,100, and at 1,240, 1,670 and 11,000 for K = 16, 32 and 128. Those
# of "triton" are calculated for an H100-class chip with 400 TFLOP/s in products, 29 T/s other
# operations and 3 TB/s: 7 products and 30 operations per pair; 14 products, each 1.2 times for
# padding and for states read twice, and 25 operations per feature; 36 bytes per entry of a state,
# which is written, scanned and read three times. That of chunks is measured on an H100: each of two
# scans takes 1.2 microseconds a chunk, for 8 heads at a time.
_MACHINES = {
    "torch": Coefficients(0.0071, 7.0e-4, 1.5e-5, 1.8e-3, 0.9e-5, 3.0e-4, 29, 128, (64, 128, 512)),
    "triton": Coefficients(
        5e-6, 1.0e-6, 1.8e-8, 8.6e-7, 4.3e-8, 1.2e-5, 0.3, 128, (128, 256, 512, 1024, 2048)
    ),
}


def power_flops(
    T: int,
    K: int,
    V: int,
    degree: int,
    form: str,
    chunk_size: int | None = None,
    *,
    queries: int = 1,
) -> int:
    """Useful floating-point operations of a forward pass, a multiply-add counted as two.

    They are those of a key head that so many query heads read. Chunked: 2 P V per token for the
    update of the state, with the mathematical P, and for each read-out, and 2 (K + V) for each pair
    of a query with a key of its token or of an earlier one of its chunk. Attention: the same pairs
    of the whole sequence, without a state; recurrent: chunks of one token.
    """
    products, pairs = _state_products_and_pairs(T, K, V, degree, form, chunk_size)
    return (1 + queries) * products + queries * pairs * 2 * (K + V)


def _state_products_and_pairs(
    T: int, K: int, V: int, degree: int, form: str, chunk_size: int | None
) -> tuple[int, int]:
    """Operations of one product of all tokens with states, and pairs of tokens that are scored."""
    if form == "attention":
        return 0, _pairs(T)
    if form == "recurrent":
        chunk_size = 1
    elif chunk_size is None:
        chunk_size = choose_chunk_size(T, K, V, degree)
    pairs = T // chunk_size * _pairs(chunk_size) + _pairs(T % chunk_size)
    return power_state_flops(T, K, V, degree), pairs


def _pairs(T: int) -> int:
    """Pairs of T tokens, each with itself and with every earlier one."""
    return T * (T + 1) // 2


def power_backward_flops(
    T: int,
    K: int,
    V: int,
    degree: int,
    form: str,
    chunk_size: int | None = None,
    *,
    queries: int = 1,
) -> int:
    """Useful floating-point operations of a backward pass; arguments as in `power_flops`.

    The state takes three products of 2 P V per token for a key head: its update (counted whether
    it is kept or computed again), dv and dφ(k); and two for each query head, dφ(q) and dS. A pair
    takes five instead of two: its score again, the gradient of the score, dv, dq and dk. With one
    query head this is 2.5 times the forward pass, exactly if K = V.
    """
    products, pairs = _state_products_and_pairs(T, K, V, degree, form, chunk_size)
    return (3 + 2 * queries) * products + queries * pairs * 5 * (K + V)


def power_state_flops(T: int, K: int, V: int, degree: int) -> int:
    """Useful floating-point operations of a state alone, forward, per head; backward takes twice.

    Forward is one product of 2 P V per token. Backward is two, dv and dφ(k): dS is only scaled.
    """
    return T * 2 * symmetric_dim(K, degree) * V


def num_chunks(B: int, T: int, chunk_size: int, documents: int | None) -> int:
    """Chunks of all sequences. If they are packed, an upper bound that needs no lengths."""
    if documents is None:
        return B * (-(-T // chunk_size))
    return T // chunk_size + documents


def keeps_states(
    tokens: int, chunks: int, K: int, V: int, degree: int, *, token_bytes: int, state_bytes: int
) -> bool:
    """Whether states before chunks are kept for the backward pass instead of computed again.

    They are if that takes no more memory than queries, keys, values and outputs: of one head, with
    as many key heads as query heads.

    Args:
        tokens, chunks: of all sequences.
        token_bytes, state_bytes: of a number of q, k and v, and of a state; a norm has float32.
    """
    state = state_features(K, degree) * (V * state_bytes + 4)
    return chunks * state <= tokens * 2 * (K + V) * token_bytes


def choose_chunk_size(T: int, K: int, V: int, degree: int, backend: str = "torch") -> int:
    """The chunk size with the lowest cost, in tokens."""
    sizes = _MACHINES[backend].chunk_sizes
    best = sizes[0]
    # Not min(…, key=…), which torch.compile cannot trace.
    for C in sizes[1:]:
        if chunked_cost(T, K, V, degree, C, backend) < chunked_cost(T, K, V, degree, best, backend):
            best = C
    return best


def choose_form(
    T: int, K: int, V: int, degree: int, backend: str = "torch"
) -> Literal["attention", "chunked"]:
    """The form with the lowest cost for T tokens. Beyond degree 4 useful states are too large."""
    C = choose_chunk_size(T, K, V, degree, backend)
    if degree > 4 or C >= T:
        return "attention"
    chunked = chunked_cost(T, K, V, degree, C, backend)
    return "chunked" if chunked < attention_cost(T, K, V, backend) else "attention"


def attention_cost(T: int, K: int, V: int, backend: str, *, sums: int = 1) -> float:
    """Cost of all pairs of tokens, scored in whole blocks: microseconds per token and head.

    Several gated sums over the same scores have a decay each, and products in common.
    """
    cost = _MACHINES[backend]
    pairs = (T + min(T, cost.block)) / 2
    return cost.token * (K + V) + pairs * (sums * cost.pair + cost.pair_product * (K + V))


def chunked_cost(T: int, K: int, V: int, degree: int, C: int, backend: str) -> float:
    """Cost of pairs inside the chunk, of features, and of the state: as `attention_cost`."""
    cost = _MACHINES[backend]
    P = state_features(K, degree)
    C = min(C, T)
    per_chunk = cost.state * P * V + cost.chunk
    per_token = P * (cost.feature + cost.feature_product * V)
    return attention_cost(C, K, V, backend) + per_token + per_chunk / C
