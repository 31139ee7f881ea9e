"""The layout of the state, which every form shares, and the gradient of the features."""

import pytest
import torch

from longhaul.kernels import state_features
from longhaul.kernels.power import reference
from longhaul.kernels.power.torch.features import (
    FeatureScratch,
    StateToRead,
    TorchFeatureMap,
    expand,
    multiplicity,
)
from longhaul.kernels.shapes import padded_width

WIDTHS = [(1, 1), (5, 1), (5, 2), (16, 2), (64, 2), (2, 4), (3, 4), (9, 4), (3, 6), (2, 8)]


@pytest.mark.parametrize(("width", "degree"), WIDTHS)
def test_features_of_all_forms_share_one_layout(width: int, degree: int) -> None:
    x = torch.randn(2, 7, width, dtype=torch.float64)
    wanted = reference.features(x, degree)
    assert wanted.shape[-1] == state_features(width, degree)
    torch.testing.assert_close(expand(x, degree), wanted)
    padded = torch.zeros(2, padded_width(width, degree), 7, dtype=torch.float64)
    padded[:, :width] = x.mT
    scratch = FeatureScratch(2, width, 7, degree, padded)
    features = TorchFeatureMap(padded, torch.empty_like(padded), scratch).features()
    torch.testing.assert_close(features.mT, wanted)
    assert torch.equal(multiplicity(width, degree, x), reference.layout(width, degree)[1].double())


@pytest.mark.parametrize(("width", "degree"), WIDTHS)
def test_features_give_the_power(width: int, degree: int) -> None:
    q, k = torch.randn(2, 10, width, dtype=torch.float64).unbind(0)
    times = multiplicity(width, degree, q)
    power = (expand(q, degree) * times * expand(k, degree)).sum(-1)
    torch.testing.assert_close(power, (q * k).sum(-1) ** degree)


@pytest.mark.parametrize(("width", "degree"), WIDTHS)
def test_contract_is_the_gradient_of_the_features(width: int, degree: int) -> None:
    K = padded_width(width, degree)
    x = torch.randn(2, K, 5, dtype=torch.float64, requires_grad=True)
    state = torch.randn(2, 3, state_features(width, degree), dtype=torch.float64)
    values = torch.randn(2, 3, 5, dtype=torch.float64)
    (wanted,) = torch.autograd.grad((state @ expand(x.mT, degree).mT * values).sum(), x)
    before = torch.randn(2, K, 5, dtype=torch.float64)
    dx = before.clone()
    scratch = FeatureScratch(2, width, 5, degree, dx)
    read = StateToRead.of(state, width, degree)
    TorchFeatureMap(x.detach(), dx, scratch).contract(read, values)
    torch.testing.assert_close(dx - before, wanted)
