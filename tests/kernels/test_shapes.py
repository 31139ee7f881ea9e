"""The layout of the state, and the comparison that the kernel tests lean on."""

import pytest
import torch

from longhaul.kernels import state_features, symmetric_dim
from longhaul.kernels.power import reference
from longhaul.kernels.power.features import FeatureMap, FeatureScratch, expand, multiplicity
from longhaul.kernels.shapes import padded_width
from longhaul.kernels.testing import assert_close

WIDTHS = [(1, 1), (5, 1), (5, 2), (16, 2), (64, 2), (3, 4), (9, 4), (3, 6), (2, 8)]


@pytest.mark.parametrize(("width", "degree"), WIDTHS)
def test_features_of_all_forms_share_one_layout(width: int, degree: int) -> None:
    x = torch.randn(2, 7, width, dtype=torch.float64)
    wanted = reference.features(x, degree)
    assert wanted.shape[-1] == state_features(width, degree)
    torch.testing.assert_close(expand(x, degree), wanted)
    padded = torch.zeros(2, padded_width(width, degree), 7, dtype=torch.float64)
    padded[:, :width] = x.mT
    scratch = FeatureScratch(2, width, 7, degree, padded)
    features = FeatureMap(padded, torch.empty_like(padded), scratch).features()
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
    dx = torch.empty(2, K, 5, dtype=torch.float64)
    scratch = FeatureScratch(2, width, 5, degree, dx)
    FeatureMap(x.detach(), dx, scratch).contract(state, values)
    torch.testing.assert_close(dx, wanted)


def test_state_sizes() -> None:
    assert symmetric_dim(64, 2) == 2080
    assert state_features(64, 2) == 2304
    assert state_features(5, 2) == 64
    assert state_features(64, 1) == symmetric_dim(64, 1) == 64
    assert state_features(16, 4) == 8960


def test_assert_close_allows_what_the_definition_earns() -> None:
    oracle = torch.linspace(1, 2, 10, dtype=torch.float64)
    definition = (oracle + 1e-4).float()
    assert_close((oracle + 3e-4).float(), oracle, definition, multiple=4.0)
    off = oracle.clone()
    off[9] += 5e-4
    with pytest.raises(AssertionError, match=r"x: .* at \[9\]: off by 0\.0005"):
        assert_close(off.float(), oracle, definition, multiple=4.0, name="x")


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_assert_close_never_passes_what_is_not_finite(bad: float) -> None:
    oracle = torch.ones(3, dtype=torch.float64)
    with pytest.raises(AssertionError, match=r"at \[1\]"):
        assert_close(torch.tensor([1.0, bad, 1.0]), oracle, torch.full((3,), bad), multiple=4.0)


def test_assert_close_never_allows_more_than_a_twentieth() -> None:
    oracle = torch.ones(3, dtype=torch.float64)
    with pytest.raises(AssertionError, match=r"allowed 0\.05"):
        assert_close(torch.full((3,), 1.06), oracle, torch.full((3,), 2.0), multiple=100.0)


def test_assert_close_wants_equal_shapes() -> None:
    with pytest.raises(AssertionError, match="shape"):
        assert_close(torch.ones(2), torch.ones(3).double(), torch.ones(3), multiple=1.0)
