"""Sizes of the state."""

import pytest

from longhaul.kernels import state_features, symmetric_dim


def test_state_sizes() -> None:
    assert symmetric_dim(64, 2) == 2080
    assert state_features(64, 2) == 2304
    assert state_features(5, 2) == 64
    assert state_features(64, 1) == symmetric_dim(64, 1) == 64
    assert state_features(16, 4) == 5280


@pytest.mark.usefixtures("unchecked")
def test_widths_and_degrees_of_no_state_are_named() -> None:
    with pytest.raises(ValueError, match=r"degree: found 2\.5, wanted a whole number"):
        symmetric_dim(8, 2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="width: found -8, wanted a whole number of at least 1"):
        symmetric_dim(-8, 2)
