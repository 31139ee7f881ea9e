import random

import numpy as np
import pytest
import torch

from longhaul.pipeline.checkpoints.rng import capture_rng, restore_rng


def _draw() -> list[float]:
    """A few numbers of each generator; an odd count of normal deviates leaves one in reserve."""
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        *torch.rand(3).tolist(),
        *torch.randn(3).tolist(),
    ]


def test_restored_generators_continue_as_the_captured_ones_did() -> None:
    _draw()
    state = {name: tensor.clone() for name, tensor in capture_rng().items()}
    expected = [_draw(), _draw()]
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    assert _draw() != expected[0]
    restore_rng(state)
    assert [_draw(), _draw()] == expected


def test_capturing_draws_nothing() -> None:
    state = capture_rng()
    first = _draw()
    restore_rng(state)
    capture_rng()
    assert _draw() == first


def test_generators_without_a_spare_deviate_come_back_without_one() -> None:
    random.seed(3)
    np.random.seed(3)
    state = capture_rng()
    expected = _draw()  # leaves a spare behind
    restore_rng(state)
    assert _draw() == expected


def test_states_of_devices_that_are_not_here_are_ignored() -> None:
    state = capture_rng()
    state["cuda.4711"] = torch.zeros(16, dtype=torch.uint8)
    restore_rng(state)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_generators_come_back() -> None:
    state = capture_rng()
    expected = torch.rand(4, device="cuda")
    restore_rng(state)
    assert torch.equal(torch.rand(4, device="cuda"), expected)
