"""The cost model: counts of FLOPs, and the choice of form and chunk size."""

import pytest

from longhaul.kernels.power.cost import (
    attention_cost,
    choose_chunk_size,
    choose_form,
    chunked_cost,
    power_flops,
)


def test_flops_by_hand() -> None:
    # The 3 queries have 1, 2 and 3 keys: 6 pairs, each 2 K for its score and 2 V for its value.
    assert power_flops(3, 5, 7, 2, "attention") == 6 * 2 * (5 + 7)
    # 15 features at K = 5: update and read-out of a 15 × 7 state. Chunks of 4, 4 and 2 tokens have
    # 10, 10 and 3 pairs: a token meets itself and what comes before it, as in the attention form.
    assert power_flops(10, 5, 7, 2, "chunked", 4) == 10 * 4 * 15 * 7 + 23 * 2 * (5 + 7)
    assert power_flops(10, 5, 7, 2, "recurrent") == 10 * (4 * 15 * 7 + 2 * (5 + 7))
    grouped = 10 * 4 * 2 * 15 * 7 + 23 * 3 * 2 * (5 + 7)  # an update, and three of all else
    assert power_flops(10, 5, 7, 2, "chunked", 4, queries=3) == grouped


def test_a_chunk_is_never_longer_than_the_sequence() -> None:
    state = 10 * 4 * 15 * 7
    assert power_flops(10, 5, 7, 2, "chunked", 64) == power_flops(10, 5, 7, 2, "chunked", 10)
    assert power_flops(10, 5, 7, 2, "chunked", 64) == state + power_flops(10, 5, 7, 2, "attention")


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_long_sequences_are_chunked_and_short_ones_are_not(degree: int) -> None:
    width = 16 if degree == 4 else 64
    forms = [choose_form(T, width, width, degree) for T in (16, 256, 4096, 65536, 2**20)]
    assert forms[0] == "attention"
    assert forms[-1] == "chunked"
    assert forms == sorted(forms)


def test_the_crossover_moves_with_the_size_of_the_state() -> None:
    def crossover(width: int, degree: int) -> int:
        lengths = range(64, 2**18, 64)
        return next(T for T in lengths if choose_form(T, width, width, degree) == "chunked")

    crossovers = [crossover(64, 1), crossover(32, 2), crossover(64, 2), crossover(16, 4)]
    assert crossovers == sorted(crossovers)
    assert 1024 < crossover(64, 2) <= 8192


def test_high_degrees_always_choose_attention() -> None:
    assert choose_form(2**20, 64, 64, 8) == "attention"


def test_cost_per_token_stops_growing_with_the_length() -> None:
    def per_token(T: int) -> float:
        return power_flops(T, 64, 64, 2, choose_form(T, 64, 64, 2)) / T

    assert per_token(2**16) == per_token(2**20)
    assert per_token(512) == 513 * 128
    C = choose_chunk_size(2**16, 64, 64, 2)
    assert per_token(2**16) == 4 * 2080 * 64 + (C + 1) * 128


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_the_chosen_chunk_size_is_the_cheapest(backend: str) -> None:
    for K, degree in ((64, 1), (32, 2), (64, 2), (16, 4)):
        chosen = choose_chunk_size(2**16, K, K, degree, backend)
        offered = (64, 128, 512) if backend == "torch" else tuple(2**n for n in range(7, 12))
        costs = {C: chunked_cost(2**16, K, K, degree, C, backend) for C in offered}
        assert costs[chosen] == min(costs.values())


def test_on_a_gpu_larger_states_have_longer_chunks() -> None:
    """A state is written and read once per chunk, so larger states should have fewer chunks."""
    sizes = [choose_chunk_size(2**16, K, K, 2, "triton") for K in (16, 32, 64, 128)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]


def test_cost_is_linear_in_the_length_and_quadratic_without_chunks() -> None:
    for backend in ("torch", "triton"):
        long, longer = (chunked_cost(T, 64, 64, 2, 256, backend) for T in (2**16, 2**20))
        assert long == longer
        pairs, twice = (attention_cost(T, 64, 64, backend) for T in (2**16, 2**17))
        assert 1.9 < twice / pairs < 2.1
