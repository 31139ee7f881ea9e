"""Figures one column wide, legible in print and by colour-blind readers."""

import logging
import math
import statistics
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Int64
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette.
BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#E69F00",
    "#CC79A7",
    "#56B4E9",
)
COLOURS = (BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY, "#000000")

KIND_COLOURS = {
    "softmax": VERMILLION,
    "conformal_sympow": BLUE,
    "sympow_gated": GREEN,
    "sympow": PURPLE,
    "retention": ORANGE,
    "linear": SKY,
    # Beyond that palette, of Tol's muted one.
    "zeros": "#999933",
    "sympow_rotary": "#882255",
    "alibi": "#332288",
    "coca": "#DDCC77",
    "complex": "#44AA99",
    "cartan": "#AA4499",
    # Baselines, of Tol's light one.
    "fox": "#77AADD",
    "sliding_window": "#EE8866",
    "mamba2": "#EEDD88",
    "gated_linear": "#BBCC33",
    "deltanet": "#AAAA00",
    "gated_deltanet": "#99DDFF",
    "kimi_delta": "#FFAABB",
    "power_delta": "#661100",
}
"""The colour of each kind, in reports and in the documentation's figures alike."""

LEAST_SPAN = 0.05
"""Nats that an axis of losses covers at least, so that noise does not look like a difference."""

ERROR_BARS = "mean ± standard error"
"""Label of means over windows, or over first tokens of documents, with error bars."""

_CHARACTERS_PER_INCH = 16
_LEGEND_LINE_INCHES = 0.16
_MOST_TICKS = 6  # numbers such as 65,536 that fit below a column


@contextmanager
def figure(
    path: Path,
    title: str,
    *,
    width: float = 3.5,
    height: float = 2.6,
    vector: Path | None = None,
) -> "Iterator[Axes]":
    """Axes to draw in; the figure is saved as a PNG when the context ends.

    Args:
        path: of the PNG.
        title: plain text, in which dollars are no formulas.
        width, height: inches; by default a column of a paper.
        vector: path of a `.pdf` or `.svg` of the same figure; None means none.
    """
    import matplotlib  # here, since it takes half a second that other commands should not pay

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    # It logs every step of embedding a font.
    logging.getLogger("fontTools").setLevel(logging.WARNING)
    # Fonts of type 42: publishers refuse matplotlib's own choice, type 3.
    with plt.rc_context({"font.size": 8, "legend.fontsize": 7, "pdf.fonttype": 42}):
        drawn, axes = plt.subplots(figsize=(width, height), dpi=300, layout="constrained")
        try:
            axes.spines[["top", "right"]].set_visible(False)
            # In the middle of the figure: above the axes alone, a long line would be cut off.
            drawn.suptitle(
                as_text(textwrap.fill(title, round(_CHARACTERS_PER_INCH * width))), fontsize=8
            )
            yield axes
            for file in (path, vector):
                if file is not None:
                    drawn.savefig(file)
        finally:
            plt.close(drawn)


def as_text(text: str) -> str:
    """A user's text with dollars escaped, between which matplotlib would read formulas."""
    return text.replace("$", r"\$")


def tokens_axis(axes: "Axes", label: str, ticks: Sequence[int] = ()) -> None:
    """Make the horizontal axis one of tokens: logarithmic to base 2, with plain numbers.

    Args:
        axes: with everything drawn already.
        label: with its unit.
        ticks: where to write numbers, as far as there is room; by default at powers of two.
    """
    from matplotlib.ticker import LogLocator, NullFormatter, NullLocator, StrMethodFormatter

    axes.set_xscale("log", base=2)
    if ticks:
        axes.set_xticks(_with_room(ticks))
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.xaxis.set_major_locator(LogLocator(base=2, numticks=_MOST_TICKS))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(label)


def _with_room(ticks: Sequence[int]) -> list[int]:
    """The ticks that are far enough apart on a logarithmic axis for their numbers.

    They are taken from the longest down, as long contexts matter most in these figures.
    """
    longest = max(ticks)
    apart = math.log2(longest / min(ticks)) / (_MOST_TICKS - 1)
    chosen = [longest]
    for tick in sorted(set(ticks) - {longest}, reverse=True):
        if math.log2(chosen[-1] / tick) > apart - 1e-9:
            chosen.append(tick)
    return chosen


def positions_axis(axes: "Axes", label: str) -> None:
    """Make the horizontal axis one of positions in a text: linear, with plain numbers."""
    from matplotlib.ticker import StrMethodFormatter

    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_xlabel(label)


def legend_below(axes: "Axes", columns: int = 2) -> None:
    """Make the figure higher and put its legend there, where it hides nothing.

    Curves with one label share one entry.
    """
    handles, labels = axes.get_legend_handles_labels()
    entries = dict(zip(labels, handles, strict=True))
    lines = sum(label.count("\n") + 1 for label in entries)
    drawn = axes.get_figure(root=True)
    assert drawn is not None
    drawn.set_figheight(drawn.get_figheight() + _LEGEND_LINE_INCHES * -(-lines // columns))
    drawn.legend(
        entries.values(),
        entries.keys(),
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        handlelength=3.2,  # three dashes are enough to recognise a line style
    )


def widen(axes: "Axes", least: float = LEAST_SPAN, *, is_relative: bool = False) -> None:
    """Make a linear vertical axis, on which all is drawn, cover at least so much.

    Args:
        axes: with everything drawn already.
        least: what it covers at least, in its unit; with `is_relative` as a share of its middle. A
            share of a perplexity is a difference in nats.
        is_relative: see `least`.
    """
    low, high = axes.get_ylim()
    middle = (low + high) / 2
    half = max(high - low, least * (abs(middle) if is_relative else 1)) / 2
    axes.set_ylim(middle - half, middle + half)


def standard_error(values: Sequence[float]) -> float:
    """Of the mean of independent values; NaN for less than two."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def shown_positions(T: int, most: int) -> Int64[Tensor, "shown"]:
    """Indices, from 0, of at most `most` of T positions, evenly spaced on a logarithmic axis."""
    if most >= T:
        return torch.arange(T)
    spaced = torch.logspace(0, math.log10(T), most, dtype=torch.float64)
    indices: Tensor = (spaced.round().long() - 1).clamp(0, T - 1).unique()
    return indices


def enlarged_from(T: int) -> int:
    """The first key of the part that is drawn enlarged: the last 500 tokens, at most half."""
    return max(T - 500, T // 2) + 1


def wilson_interval(right: float, count: float, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval of a share, after `right` out of `count`, at z standard deviations."""
    share, extra = right / count, z**2 / count
    centre = share + extra / 2
    spread = z * math.sqrt(share * (1 - share) / count + extra / (4 * count))
    return max(0.0, (centre - spread) / (1 + extra)), min(1.0, (centre + spread) / (1 + extra))


def clustered_interval(shares: Sequence[float], size: int) -> tuple[float, float]:
    """Wilson's interval of 95 % of a mean of shares, each of `size` answers of one sequence.

    Answers of one sequence go right or wrong together. The interval is that of as many independent
    answers as would give the shares' standard error; of one answer a sequence, where all are alike.
    """
    mean, error = statistics.fmean(shares), standard_error(shares)
    independent = float(len(shares))
    if error > 0:
        independent = min(mean * (1 - mean) / error**2, independent * size)
    return wilson_interval(mean * independent, independent)
