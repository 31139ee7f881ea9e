"""Losses at positions, in bins and up to positions, against plain loops over windows."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev

import pytest
import torch
from torch import Tensor

from longhaul.pipeline.evaluation.tasks.positions import (
    PositionLoss,
    bin_width,
    summarise,
    summarise_with_errors,
)


def measured(losses: Tensor) -> PositionLoss:
    metric = PositionLoss(losses.shape[1])
    metric.update(losses[:2])
    metric.update(losses[2:])
    return metric


def assert_means(
    found: tuple[Tensor, Tensor], of_windows: Sequence[Sequence[float]], windows: int
) -> None:
    """The means over windows of some quantities, and their standard errors."""
    mean, error = found
    assert len(mean) == len(error) == len(of_windows)
    for index, values in enumerate(of_windows):
        assert mean[index].item() == pytest.approx(fmean(values), abs=1e-9)
        wanted = stdev(values) / math.sqrt(windows)
        assert error[index].item() == pytest.approx(wanted, abs=1e-6)


def test_losses_and_errors_are_those_of_windows() -> None:
    losses = torch.randn(7, 250, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    losses[:, 245] += 3  # a window's neighbouring losses have more in common than their mean
    metric = measured(losses)
    rows = losses.tolist()
    assert_means(metric.by_position(), [[row[t] for row in rows] for t in range(250)], 7)
    up_to = [[fmean(row[: t + 1]) for row in rows] for t in range(250)]
    assert_means(metric.up_to_position(), up_to, 7)
    bins = [[fmean(row[t : t + 2]) for row in rows] for t in range(0, 250, 2)]
    assert_means(metric.in_bins(), bins, 7)
    values = summarise_with_errors(metric, "x")
    for p in (1, 2, 128):
        assert values[f"x/loss_up_to_{p:06d}"] == pytest.approx(fmean(up_to[p - 1]))
        wanted = stdev(up_to[p - 1]) / math.sqrt(7)
        assert values[f"x/loss_up_to_{p:06d}_standard_error"] == pytest.approx(wanted)
    assert values["x/loss_standard_error"] == pytest.approx(stdev(up_to[-1]) / math.sqrt(7))


def test_bins_are_as_far_apart_as_the_published_points() -> None:
    assert bin_width(65_536) == 655
    metric = PositionLoss(65_536)
    metric.update(torch.arange(65_536.0)[None])
    bins, _ = metric.in_bins()
    assert len(bins) == 101  # as many as there are points; the last is of the 36 that are left
    assert bins[:2].tolist() == [327.0, 982.0]
    assert bins[-1].item() == (65_500 + 65_535) / 2


def test_one_document_has_no_error() -> None:
    metric = PositionLoss(1)
    metric.update(torch.ones(1, 1))
    assert metric.by_position()[0].tolist() == [1.0]
    assert metric.by_position()[1].isnan().all()
    assert summarise_with_errors(metric, "x") == {
        "x/loss": 1.0,
        "x/loss_at_000001": 1.0,
        "x/loss_up_to_000001": 1.0,
    }


def test_losses_are_summed_in_float64() -> None:
    # In float32 the millionth sample would add nothing to the sum of the others.
    metric = PositionLoss(1)
    metric.update(torch.full((1, 1), 2.0**25))
    for _ in range(10):
        metric.update(torch.ones(1, 1))
    assert metric.sums.tolist() == [2**25 + 10] * 3


def test_summary_names_powers_of_two() -> None:
    values = summarise(torch.arange(1.0, 11.0, dtype=torch.float64), "x")
    assert values["x/loss"] == 5.5
    at = {key: value for key, value in values.items() if "_at_" in key}
    assert at == {f"x/loss_at_{p:06d}": float(p) for p in (1, 2, 4, 8)}
