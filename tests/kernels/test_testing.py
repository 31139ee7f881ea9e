"""The comparison that every kernel test relies on."""

import pytest
import torch

from longhaul.kernels.testing import assert_close


def test_assert_close_allows_a_multiple_of_the_definitions_error() -> None:
    oracle = torch.linspace(1, 2, 10, dtype=torch.float64)
    definition = (oracle + 1e-4).float()
    assert_close((oracle + 3e-4).float(), oracle, definition, multiple=4.0)
    off = oracle.clone()
    off[9] += 5e-4
    with pytest.raises(AssertionError, match=r"x: .* at \[9\]: off by 0\.0005"):
        assert_close(off.float(), oracle, definition, multiple=4.0, name="x")


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_assert_close_rejects_nan_and_inf(bad: float) -> None:
    oracle = torch.ones(3, dtype=torch.float64)
    with pytest.raises(AssertionError, match=r"at \[1\]"):
        assert_close(torch.tensor([1.0, bad, 1.0]), oracle, torch.full((3,), bad), multiple=4.0)


def test_assert_close_never_allows_more_than_a_twentieth() -> None:
    oracle = torch.ones(3, dtype=torch.float64)
    with pytest.raises(AssertionError, match=r"allowed 0\.05"):
        assert_close(torch.full((3,), 1.06), oracle, torch.full((3,), 2.0), multiple=100.0)


def test_assert_close_rejects_unequal_shapes() -> None:
    with pytest.raises(AssertionError, match="shape"):
        assert_close(torch.ones(2), torch.ones(3).double(), torch.ones(3), multiple=1.0)
