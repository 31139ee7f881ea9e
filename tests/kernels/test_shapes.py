"""Sizes of the state."""

from longhaul.kernels import state_features, symmetric_dim


def test_state_sizes() -> None:
    assert symmetric_dim(64, 2) == 2080
    assert state_features(64, 2) == 2304
    assert state_features(5, 2) == 64
    assert state_features(64, 1) == symmetric_dim(64, 1) == 64
    assert state_features(16, 4) == 8960
