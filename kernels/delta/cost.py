"""The cost of a call from its sizes alone, and the chunk size with the lowest cost."""

from __future__ import annotations

# Of 16, 32 and 64 tokens the fastest in torch on a CPU with AVX-512, forward and backward, for K =
# V = 64 and 128: shorter chunks have fewer pairs, longer ones fewer steps of the state.
# With Triton a chunk is a block of one program, whose products should fill matrix units.
_CHUNK = {"torch": 32, "triton": 64}


def choose_chunk_size(T: int, backend: str = "torch") -> int:
    """Tokens of a chunk: the next power of two for short sequences."""
    # Not a shift by T.bit_length(), since torch.compile may treat T as a symbol.
    size = 1
    while size < min(T, _CHUNK[backend]):
        size *= 2
    return size


def state_size(H: int, K: int, V: int) -> int:
    """Numbers, of float32, in the state of a sequence."""
    return H * K * V


def delta_flops(T: int, K: int, V: int, chunk_size: int | None, *, erases: bool = True) -> int:
    """Useful floating-point operations of a forward pass, a multiply-add counted as two.

    They are those of a head of values. For each pair of a token with itself or an earlier one of
    its chunk 2 (K + V), the score of the query and the value that is read; with erasing 2 K more
    for the score of both keys, and 2 (K + V) for the solution of the triangular system. For each
    token 2 K V for the update of the state and for its read-out, and with erasing for the values
    that the state holds. None as the chunk size means the recurrent form: chunks of one token.
    """
    chunks, rest = divmod(T, chunk_size or 1)
    pairs = chunks * _pairs(chunk_size or 1) + _pairs(rest)
    per_pair, products = 2 * (K + V), 2
    if erases:
        per_pair, products = 2 * (K + V) + 2 * K + 2 * (K + V), 3
    return pairs * per_pair + T * products * 2 * K * V


def delta_backward_flops(T: int, K: int, V: int, chunk_size: int, *, erases: bool = True) -> int:
    """Useful floating-point operations of a backward pass; arguments as in `delta_flops`.

    Every product of the forward pass has two gradients; and all but those with which the output is
    read are computed again.
    """
    forward = delta_flops(T, K, V, chunk_size, erases=erases)
    chunks, rest = divmod(T, chunk_size)
    read = (chunks * _pairs(chunk_size) + _pairs(rest)) * 2 * V + T * 2 * K * V
    return 3 * forward - read


def step_bytes(H: int, K: int, V: int, state_bytes: int = 4) -> int:
    """Bytes that a step moves: the state is read and written."""
    return 2 * state_bytes * state_size(H, K, V)


def _pairs(T: int) -> int:
    """Pairs of T tokens, each with itself and with every earlier one."""
    return T * (T + 1) // 2
