"""Comparison with a float64 oracle, allowing a multiple of the error of the definition itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

# The largest tolerance, as a fraction of the oracle's largest value, whatever the definition does.
_LOOSEST = 0.05


class Comparison(NamedTuple):
    """How far a tensor is from the oracle. Errors are fractions of the oracle's largest value."""

    error: float  # the largest
    allowed: float
    norm_error: float  # ‖actual − oracle‖ / ‖oracle‖
    fault: str | None  # what is wrong, or None


def compare(
    actual: Tensor,
    oracle: Tensor,
    definition: Tensor,
    *,
    multiple: float,
    dtype: torch.dtype | None = None,
) -> Comparison:
    """Whether `actual` is about as close to the oracle as the definition is.

    Args:
        actual: what is tested.
        oracle: the definition computed in float64.
        definition: the definition computed in the dtype of `actual`, or in another dtype: its
            error is then scaled by the ratio of the two machine epsilons.
        multiple: how many times the largest error of `definition` is allowed.
        dtype: the dtype of the call's inputs. Their rounding affects results that are float32
            themselves, such as states and gradients of gates. None means the dtype of `actual`.
    """

    def failed(fault: str) -> Comparison:
        return Comparison(torch.nan, 0.0, torch.nan, fault)

    if actual.shape != oracle.shape:
        return failed(f"shape {tuple(actual.shape)}, wanted {tuple(oracle.shape)}")
    if not actual.isfinite().all():
        where = (~actual.isfinite()).nonzero()[0].tolist()
        return failed(f"{actual[tuple(where)].item()} at {where}")
    if actual.numel() == 0:
        return Comparison(0.0, 0.0, 0.0, None)
    size = oracle.abs().max().item()
    epsilon = torch.finfo(dtype or actual.dtype).eps
    definition_error = (definition.double() - oracle).abs().max().item()
    definition_error *= torch.finfo(actual.dtype).eps / torch.finfo(definition.dtype).eps
    share = min(multiple * max(definition_error / (size or 1.0), epsilon), _LOOSEST)
    allowed = share * size
    error = (actual.double() - oracle).abs()
    worst = error.argmax()
    largest = error.flatten()[worst].item()
    fault = None
    # Not >: an oracle that holds a NaN must not pass.
    if not largest <= allowed:
        where = [int(i) for i in torch.unravel_index(worst, error.shape)]
        found, wanted = actual.flatten()[worst].item(), oracle.flatten()[worst].item()
        fault = (
            f"{found:.6g}, wanted {wanted:.6g} at {where}: off by {largest:.3g} "
            f"({largest / max(abs(wanted), 1e-300):.3g} of it), allowed {allowed:.3g}"
        )
    norm_error = error.norm().item() / (oracle.norm().item() or 1.0)
    return Comparison(largest / (size or 1.0), share, norm_error, fault)


def assert_close(
    actual: Tensor, oracle: Tensor, definition: Tensor, *, multiple: float, name: str = "tensor"
) -> None:
    """Raise AssertionError, naming the tensor, unless `compare` finds no fault."""
    if fault := compare(actual, oracle, definition, multiple=multiple).fault:
        raise AssertionError(f"{name}: {fault}")


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill uninitialised memory with NaN, so that no code can rely on it being zero."""

    def poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def wrapper(*args: Any, **kwargs: Any) -> Tensor:
            x = make(*args, **kwargs)
            if x.is_floating_point() and not x.is_meta:
                x.detach().fill_(torch.nan)
            return x

        return wrapper

    with (
        patch.object(torch, "empty", poisoned(torch.empty)),
        patch.object(torch, "empty_like", poisoned(torch.empty_like)),
        patch.object(torch, "empty_strided", poisoned(torch.empty_strided)),
        patch.object(Tensor, "new_empty", poisoned(Tensor.new_empty)),
    ):
        yield
