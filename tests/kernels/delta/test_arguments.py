"""Arguments of the delta rule that are refused, and its cost model."""

from typing import Any

import pytest
import torch

from longhaul.kernels import delta_rule, delta_rule_step
from longhaul.kernels.delta.cost import (
    choose_chunk_size,
    delta_backward_flops,
    delta_flops,
    state_size,
)


def arguments(T: int = 20) -> dict[str, Any]:
    return {
        "q": torch.ones(1, T, 2, 8),
        "k": torch.ones(1, T, 2, 8),
        "v": torch.ones(1, T, 4, 3),
        "beta": torch.ones(1, T, 4),
        "log_g": torch.zeros(1, T, 4),
    }


BAD: list[tuple[str, dict[str, Any]]] = [
    ("q: found list, wanted a tensor", {"q": [1.0]}),
    (r"q: found shape \(1, 20, 4, 8\), wanted \(1, 20, 2, 8\)", {"q": torch.ones(1, 20, 4, 8)}),
    ("k: found 2 heads, wanted a divisor of the 3", {"v": torch.ones(1, 20, 3, 3)}),
    (r"v: found shape \(1, 19, 4, 3\), wanted \(1, 20, H, V\)", {"v": torch.ones(1, 19, 4, 3)}),
    ("v: found torch.float64, wanted one floating", {"v": torch.ones(1, 20, 4, 3).double()}),
    ("beta: found float, wanted a tensor", {"beta": 1.0}),
    (r"beta: found shape \(1, 20, 2\), wanted \(1, 20, 4\)", {"beta": torch.ones(1, 20, 2)}),
    ("beta: found torch.int64", {"beta": torch.ones(1, 20, 4, dtype=torch.int64)}),
    (
        r"log_g: found shape \(1, 20, 2\), wanted \(1, 20, 4\), or \(1, 20, 4, 8\)",
        {"log_g": torch.zeros(1, 20, 2)},
    ),
    ("log_g: found torch.bfloat16, wanted float32", {"log_g": torch.zeros(1, 20, 4).bfloat16()}),
    ("scale: found nan", {"scale": float("nan")}),
    ("chunk_size: found 0", {"chunk_size": 0}),
    ("chunk_size: found 48, wanted a power of two", {"chunk_size": 48}),
    ("output_final_state: found 1", {"output_final_state": 1}),
    ("form: found 'attention', wanted one of auto, chunked, recurrent", {"form": "attention"}),
    (
        "backend: found 'cuda', wanted one of auto, reference, torch, triton, fla",
        {"backend": "cuda"},
    ),
    (
        r"initial_state: found shape \(1, 2, 8, 3\), wanted \(1, 4, 8, 3\)",
        {"initial_state": torch.ones(1, 2, 8, 3)},
    ),
    ("initial_state: found tuple, wanted a tensor", {"initial_state": (1, 2)}),
    ("document 1 from 5 to 5, wanted at least one", {"cu_seqlens": torch.tensor([0, 5, 5, 20])}),
    ("wanted offsets from 0 to 20", {"cu_seqlens": torch.tensor([0, 5, 19])}),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("message", "change"), BAD, ids=[message for message, _ in BAD])
def test_bad_input_is_named(message: str, change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=message):
        delta_rule(**(arguments() | change))


@pytest.mark.usefixtures("unchecked")
def test_bad_steps_are_named() -> None:
    state = torch.zeros(1, 4, 8, 3)
    with pytest.raises(ValueError, match="q: found 20 tokens, wanted 1"):
        delta_rule_step(state, **arguments())
    with pytest.raises(ValueError, match=r"state: found shape \(1, 4, 3, 8\)"):
        delta_rule_step(state.mT, **arguments(T=1))
    with pytest.raises(ValueError, match="inplace: found tensors that need a gradient"):
        delta_rule_step(state.requires_grad_(), **arguments(T=1), inplace=True)


def counted(T: int, K: int, V: int, C: int, *, erases: bool) -> int:
    """FLOPs counted product by product."""
    flops = 0
    for t in range(T):
        past = t % C + 1  # tokens of the chunk, with this one
        flops += past * 2 * K + past * 2 * V  # scores of the query; values that are read
        flops += 2 * K * V * 2  # read-out and update of the state
        if erases:
            flops += past * 2 * K  # scores of the key
            flops += past * 2 * (K + V)  # substitution
            flops += 2 * K * V  # values that the state holds
    return flops


@pytest.mark.parametrize("erases", [False, True])
def test_flops_are_those_of_every_product(erases: bool) -> None:
    for T, C in ((10, 4), (16, 4), (3, 64), (1, 1)):
        assert delta_flops(T, 5, 7, C, erases=erases) == counted(T, 5, 7, C, erases=erases)
    assert delta_flops(9, 5, 7, None, erases=erases) == counted(9, 5, 7, 1, erases=erases)
    assert delta_backward_flops(64, 16, 16, 16) > 2 * delta_flops(64, 16, 16, 16)


def test_chunks_are_no_longer_than_needed() -> None:
    assert [choose_chunk_size(T) for T in (1, 2, 3, 9, 10**6)] == [1, 2, 4, 16, 32]


def test_size_of_a_state() -> None:
    _, state = delta_rule(**arguments(), output_final_state=True)
    assert state is not None
    assert state.numel() == state_size(4, 8, 3)
