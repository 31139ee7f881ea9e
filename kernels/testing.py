"""Comparison with a tolerance that is earned: by the error the definition itself makes."""

from __future__ import annotations

import torch
from torch import Tensor

# No comparison is looser than this part of the largest value, whatever the definition does.
_LOOSEST = 0.05


def assert_close(
    actual: Tensor, oracle: Tensor, definition: Tensor, *, multiple: float, name: str = "tensor"
) -> None:
    """Raise AssertionError unless `actual` is about as near to the oracle as the definition is.

    Args:
        actual: what is tested.
        oracle: the definition computed in float64.
        definition: the definition computed in the dtype of `actual`, or in another dtype: its
            error is then scaled by the ratio of the two roundings.
        multiple: how many times the largest error of `definition` is allowed.
        name: what to call the tensor in a message.
    """
    if actual.shape != oracle.shape:
        raise AssertionError(f"{name}: shape {tuple(actual.shape)}, wanted {tuple(oracle.shape)}")
    if not actual.isfinite().all():
        where = (~actual.isfinite()).nonzero()[0].tolist()
        raise AssertionError(f"{name}: {actual[tuple(where)].item()} at {where}")
    if actual.numel() == 0:
        return
    size = oracle.abs().max().item()
    epsilon = torch.finfo(actual.dtype).eps
    earned = (definition.double() - oracle).abs().max().item()
    earned *= epsilon / torch.finfo(definition.dtype).eps
    allowed = min(multiple * max(earned, epsilon * size), _LOOSEST * size)
    error = (actual.double() - oracle).abs()
    worst = error.argmax()
    if error.flatten()[worst] > allowed:
        where = [int(i) for i in torch.unravel_index(worst, error.shape)]
        found, wanted = actual.flatten()[worst].item(), oracle.flatten()[worst].item()
        relative = error.flatten()[worst].item() / max(abs(wanted), 1e-300)
        raise AssertionError(
            f"{name}: {found:.6g}, wanted {wanted:.6g} at {where}: off by "
            f"{error.flatten()[worst].item():.3g} ({relative:.3g} of it), allowed {allowed:.3g}"
        )
