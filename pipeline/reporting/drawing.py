"""Figures and tables as data, and the files drawn from them: PNG, PDF and CSV."""

import csv
import math
import textwrap
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from longhaul.datamodules.files.plain_text import plain
from longhaul.pipeline.evaluation.figures import (
    LEAST_SPAN,
    as_text,
    figure,
    legend_below,
    positions_axis,
    tokens_axis,
    widen,
)
from longhaul.pipeline.evaluation.tables import XAxis, YAxis
from longhaul.pipeline.reporting.runs import Run
from longhaul.pipeline.reporting.variants import Look, NamedRuns
from longhaul.pipeline.terminal.numbers import amount, in_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = Sequence[str | int | float]

_MOST_MARKERS = 8
_TRAINED = "training context"
_LEGEND_CHARACTERS = 54  # that fit in a line of the legend


@dataclass(frozen=True)
class Series:
    """One line, or a set of points."""

    label: str
    look: Look
    x: Sequence[float]
    y: Sequence[float]
    is_finished: bool = True
    """Whether its run is finished; otherwise markers are hollow and lines are thin."""

    line: str | None = None
    """matplotlib's name of the line style; None: that of the look; empty: points only."""

    band: tuple[Sequence[float], Sequence[float]] | None = None
    """Lower and upper bounds of y over seeds, or heads: a shaded area."""

    windows: tuple[Sequence[float], Sequence[float]] | None = None
    """Bounds of y over windows, documents or prompts of one run: thin dotted lines."""

    is_seed: bool = False
    """Whether it is one of several seeds, whose mean has the label and the markers."""


def series_of(
    named: NamedRuns, run: Run, x: Sequence[float], y: Sequence[float], line: str | None = None
) -> Series:
    """The line, or the points, of one run."""
    return Series(named.label(run), named.look(run), x, y, run.is_finished, line)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure one column wide."""

    name: str
    """Name of its files, without a suffix."""

    title: str
    caption: str
    """What a reader must know to understand it."""

    y_label: str
    series: Sequence[Series]
    columns: Sequence[str]
    rows: Sequence[Row]
    """Rows of the CSV file, below the column names."""

    x_label: str = "training context (tokens)"
    x_axis: XAxis = "context"
    """context: base 2; tokens: linear, trained tokens; position: linear, positions in a text;
    bytes: base 10."""

    has_ticks: bool = True
    """Whether an axis of contexts has its numbers at the points, not at powers of two."""

    y_axis: YAxis = "loss"
    """loss, perplexity: linear, and wide enough that noise does not look like a difference."""

    y_range: tuple[float, float] | None = None
    """Where the vertical axis begins and ends; values outside are cut off."""

    trained_at: int | None = None
    """Training context to mark with a vertical line; None means no mark."""

    reference: tuple[str, float] | None = None
    """Label and value of a horizontal line; None means none."""

    caveats: Sequence[str] = ()
    """Sentences that stand above it: what forbids conclusions from it."""

    bytes_per_token: float = math.nan
    """Of the text whose losses y has: a second axis shows bits per byte. NaN means none."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table on the page; its CSV file has the same cells, numbers with all their digits."""

    name: str
    title: str
    caption: str
    columns: Sequence[str]
    rows: Sequence[Row]
    caveats: Sequence[str] = ()


def write_csv(path: Path, columns: Sequence[str], rows: Sequence[Row]) -> None:
    """Write a CSV file in UTF-8, in which no text is a formula or controls a terminal."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows([_inert(cell) for cell in row] for row in rows)


def _inert(cell: str | int | float) -> str | int | float:
    """A number as it is; a text with escaped control characters, after ' if it may be a formula.

    Spreadsheets compute what begins with =, +, - or @, also in their full-width forms. A tab or a
    carriage return in front, which some of them skip, is an escape by then.
    """
    if not isinstance(cell, str):
        return cell
    text = plain(cell)
    try:
        float(text)
    except ValueError:
        if unicodedata.normalize("NFKC", text.lstrip()[:1]) in ("=", "+", "-", "@"):
            return f"'{text}"
    return text


def draw(drawing: Figure, folder: Path) -> None:
    """Write NAME.png, NAME.pdf and NAME.csv."""
    write_csv(folder / f"{drawing.name}.csv", drawing.columns, drawing.rows)
    labels = {one.label for one in drawing.series} | {_TRAINED}
    if drawing.reference is not None:
        labels.add(drawing.reference[0])
    columns = 2 if max(map(len, labels)) <= _LEGEND_CHARACTERS // 2 else 1
    png, pdf = (folder / f"{drawing.name}.{suffix}" for suffix in ("png", "pdf"))
    with figure(png, drawing.title, vector=pdf) as axes:
        for one in drawing.series:
            _plot(axes, one)
        if drawing.trained_at is not None:
            axes.axvline(drawing.trained_at, color="black", linestyle=":", label=_TRAINED, zorder=0)
        if drawing.reference is not None:
            label, value = drawing.reference
            axes.axhline(value, color="grey", linestyle="--", label=label, zorder=0)
        _axes(axes, drawing)
        # Runs that differ only in their seed share one entry.
        legend_below(axes, columns)


def _plot(axes: "Axes", one: Series) -> None:
    if one.band is not None and len(one.x) == 1:
        low, high = one.band
        axes.vlines(one.x, low, high, color=one.look.colour, alpha=0.4, linewidth=1)
    elif one.band is not None:
        axes.fill_between(one.x, *one.band, color=one.look.colour, alpha=0.12, linewidth=0)
    for bound in one.windows or ():
        axes.plot(one.x, bound, color=one.look.colour, linestyle=":", linewidth=0.6)
    if one.is_seed:
        axes.plot(
            one.x,
            one.y,
            linestyle="none" if one.line == "" else "-",
            color=one.look.colour,
            linewidth=0.4,
            alpha=0.6,
            marker=".",
            markersize=2,
        )
        return
    axes.plot(
        one.x,
        one.y,
        linestyle=(one.look.line if one.line is None else one.line) or "none",
        color=one.look.colour,
        linewidth=1.2 if one.is_finished else 0.7,
        marker=one.look.marker,
        markersize=4,
        markerfacecolor=one.look.colour if one.is_finished else "white",
        markevery=-(-len(one.x) // _MOST_MARKERS),
        label=as_text(_wrapped(one.label)),
    )


def _heights(drawing: Figure) -> list[float]:
    """All finite values, and that of the reference."""
    values = [y for one in drawing.series for y in one.y if math.isfinite(y)]
    return values if drawing.reference is None else [*values, drawing.reference[1]]


def _cut_bands(axes: "Axes", drawing: Figure) -> None:
    """Let bands reach beyond the values by half their range, or the least span, and no further.

    The interval of two seeds is so wide that nothing else could be seen beside it.
    """
    values = _heights(drawing)
    if not values:
        return
    low, high = axes.get_ylim()
    room = max((max(values) - min(values)) / 2, LEAST_SPAN / 2)
    axes.set_ylim(max(low, min(values) - room), min(high, max(values) + room))


def _wrapped(label: str) -> str:
    return textwrap.fill(label, _LEGEND_CHARACTERS)


def _axes(axes: "Axes", drawing: Figure) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    axes.set_ylabel(drawing.y_label)
    if drawing.y_axis == "share":
        axes.set_ylim(-0.02, 1.02)
    elif drawing.y_axis == "from zero":
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: amount(value)))
    elif drawing.y_axis == "log":
        axes.set_yscale("log")
        values = _heights(drawing)
        axes.set_ylim(min(values) / 1.5, max(values) * 1.5)  # Bands of few seeds are cut off.
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    elif drawing.y_axis != "score":
        _cut_bands(axes, drawing)
        widen(axes, is_relative=drawing.y_axis == "perplexity")
    if drawing.y_range is not None:
        axes.set_ylim(*drawing.y_range)
    if math.isfinite(drawing.bytes_per_token):
        nats = math.log(2) * drawing.bytes_per_token  # of one bit per byte
        ways = (lambda y: y / nats), (lambda y: y * nats)
        bits = axes.secondary_yaxis("right", functions=ways)
        bits.set_ylabel("bits per byte")
    if drawing.x_axis == "context":
        ticks = [int(x) for one in drawing.series for x in one.x] if drawing.has_ticks else ()
        tokens_axis(axes, drawing.x_label, ticks)
        return
    if drawing.x_axis == "position":
        positions_axis(axes, drawing.x_label)
        return
    axes.set_xlabel(drawing.x_label)
    if drawing.x_axis == "tokens":
        axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: amount(value)))
        return
    axes.set_xscale("log")
    values = [x for one in drawing.series for x in one.x]
    # If all states have about the same size, a narrow axis would show no number at all.
    low, high = min(values), max(values)
    middle = math.sqrt(low * high)
    axes.set_xlim(min(low / 1.5, middle / 4), max(high * 1.5, middle * 4))
    is_wide = high / low > 1e3
    axes.xaxis.set_major_locator(LogLocator(subs=(1,) if is_wide else (1, 3), numticks=8))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: in_bytes(value)))
