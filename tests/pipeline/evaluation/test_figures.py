"""Axes, legends and error bars of figures."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from longhaul.pipeline.evaluation.figures import (
    figure,
    legend_below,
    standard_error,
    tokens_axis,
    widen,
)
from longhaul.pipeline.evaluation.tasks import attention, positions
from longhaul.pipeline.evaluation.tasks.positions import PositionLoss


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The axes of figures that tasks draw."""
    seen = []

    @contextmanager
    def spy(*args: Any, **options: Any) -> Iterator[Any]:
        with figure(*args, **options) as axes:
            yield axes
            seen.append(axes)

    monkeypatch.setattr("longhaul.pipeline.evaluation.figures.figure", spy)
    return seen


def test_noise_does_not_fill_an_axis(tmp_path: Path) -> None:
    with figure(tmp_path / "a.png", "a") as axes:
        axes.plot([64, 128, 256], [3.850, 3.849, 3.851])
        widen(axes)
        low, high = axes.get_ylim()
        assert high - low == pytest.approx(0.05)
        assert (low + high) / 2 == pytest.approx(3.85, abs=1e-3)
    with figure(tmp_path / "b.png", "b") as axes:
        axes.plot([64, 128], [40.0, 40.1])
        widen(axes, is_relative=True)
        low, high = axes.get_ylim()
        assert high - low == pytest.approx(0.05 * 40.05, rel=1e-3)
    with figure(tmp_path / "c.png", "c") as axes:
        axes.plot([64, 128], [3.0, 4.0])
        before = axes.get_ylim()
        widen(axes)
        assert axes.get_ylim() == pytest.approx(before)


def test_no_title_reaches_beyond_its_figure(tmp_path: Path) -> None:
    title = "Loss in windows of each length minus softmax's, trained at 64"
    with figure(tmp_path / "a.png", title) as axes:
        axes.set_ylabel("loss")
        axes.set_yticks([0.0], ["-0.00000"])
    drawn = axes.get_figure(root=True)
    assert drawn is not None
    (shown,) = (text for text in drawn.findobj(Text) if "trained" in text.get_text())
    extent = shown.get_window_extent()
    assert drawn.bbox.x0 < extent.x0 < extent.x1 < drawn.bbox.x1


def test_errors_of_means_need_two_values() -> None:
    assert standard_error([1.0, 3.0]) == pytest.approx(1.0)
    assert math.isnan(standard_error([1.0]))


def test_a_legend_hides_nothing(tmp_path: Path, drawn: list[Any]) -> None:
    metric = PositionLoss(64)
    metric.update(torch.rand(4, 64) + 3)
    for draw in (positions.draw, positions.draw_bins):
        draw(tmp_path / "positions.png", metric, "a", trained_at=32, baseline=3.0)
    lines = {"training context", "bigram model"}
    for axes, own in zip(
        drawn, ({"at the position", "mean up to it"}, {"at the position"}), strict=True
    ):
        (legend,) = axes.figure.legends
        canvas = FigureCanvasAgg(axes.figure)
        canvas.draw()
        renderer = canvas.get_renderer()
        assert {text.get_text() for text in legend.get_texts()} == lines | own
        assert legend.get_window_extent(renderer).y1 < axes.get_tightbbox(renderer).y0
        assert axes.get_legend() is None


def test_curves_with_one_label_share_an_entry(tmp_path: Path) -> None:
    with figure(tmp_path / "a.png", "a") as axes:
        for label in ("b", "a", "b"):
            axes.plot([1, 2], [1, 2], label=label)
        tokens_axis(axes, "tokens")
        legend_below(axes)
        (legend,) = axes.figure.legends
        assert [text.get_text() for text in legend.get_texts()] == ["b", "a"]


@pytest.mark.parametrize(
    ("lengths", "shown"),
    [
        ([256, 512, 1024, 2048, 4096, 8192], [256, 512, 1024, 2048, 4096, 8192]),
        ([512, 2048, 4096, 5632, 6656, 7680, 8192], [512, 2048, 4096, 8192]),
        ([64, 64], [64]),
    ],
)
def test_numbers_of_an_axis_do_not_overlap(
    lengths: list[int], shown: list[int], tmp_path: Path
) -> None:
    with figure(tmp_path / "a.png", "a") as axes:
        axes.plot(lengths, lengths)
        tokens_axis(axes, "tokens", lengths)
        assert sorted(axes.get_xticks()) == shown


def test_maps_name_their_layers_and_axes(tmp_path: Path, drawn: list[Any]) -> None:
    attention.draw_maps(tmp_path / "maps.png", [torch.rand(16, 16) for _ in range(6)], "a")
    (axes,) = drawn
    assert [text.get_text() for text in axes.texts] == [f"layer {layer}" for layer in range(6)]
    assert "key" in axes.get_xlabel()
    assert "query" in axes.get_ylabel()
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["1", "16"] * 2
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1", "16"] * 4
