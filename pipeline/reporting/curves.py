"""Curves of evaluations: their means over seeds, and their paired gaps to a reference kind."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from longhaul.pipeline.evaluation.tables import Band, Curve
from longhaul.pipeline.reporting.comparison import by_seed
from longhaul.pipeline.reporting.drawing import Row, Series
from longhaul.pipeline.reporting.groups import OPTIONS, EvaluatedRun, Group
from longhaul.pipeline.reporting.runs import Run
from longhaul.pipeline.reporting.seeds import interval
from longhaul.pipeline.reporting.variants import NamedRuns

_LINE_STYLES = ("--", "-.", ":")
"""Of runs read with scaled positions."""

MOST_DRAWN = 500.0
"""Nats up to which bounds and lines of perplexities are drawn; exp of more overflows."""


def table_rows(named: NamedRuns, group: Group, curves: Sequence[Curve]) -> list[Row]:
    """Rows of all runs, which stand apart: their means over seeds can be computed from them."""
    rows = list[Row]()
    for one, curve in zip(group.members, curves, strict=True):
        label = one.evaluated.label
        setting = [*named.leading_cells(one.run), one.run.seed, label.step, one.scaling, group.text]
        rows += [[*setting, *row] for row in zip(*curve.columns.values(), strict=True)]
    return rows


def _alike(one: EvaluatedRun, curve: Curve) -> tuple[Any, ...]:
    """What results must have in common to be averaged or compared."""
    options = [curve.columns[name][0] for name in OPTIONS if name in curve.columns]
    return one.scaling, tuple(curve.x), *options


def mean_series(
    named: NamedRuns,
    group: Group,
    curves: Sequence[Curve],
    unit: Callable[[float], float],
    *,
    are_heads: bool = False,
) -> list[Series]:
    """A line for each variant and way of reading: the mean over seeds of several, or the one run.

    Where bands of curves are over heads, they are joined; elsewhere they are over windows, and
    those of a mean are as wide as the runs' are on average.
    """
    every = {one.scaling for one in group.members}
    # Where all have one scaling, nothing needs to be told apart.
    scalings = sorted(every - {""}) if len(every) > 1 else []
    alike: dict[tuple[Any, ...], list[tuple[Run, Curve]]] = defaultdict(list)
    for one, curve in zip(group.members, curves, strict=True):
        alike[named.label(one.run), *_alike(one, curve)].append((one.run, curve))
    series = []
    for (label, scaling, *_), members in alike.items():
        line = "-" if scalings else None
        if scaling in scalings:
            line = _LINE_STYLES[scalings.index(scaling) % len(_LINE_STYLES)]
        label = label + (f", {scaling}" if scaling else "")
        run, first = members[0]
        look, is_finished = named.look(run), run.is_finished
        bands = [curve.band for _, curve in members if curve.band is not None]
        if len(members) == 1 or not is_finished:
            for _, curve in members:
                heads, windows = (curve.band, None) if are_heads else (None, curve.band)
                series.append(
                    Series(label, look, curve.x, curve.y, is_finished, line, heads, windows)
                )
            continue
        series += [
            Series(label, look, curve.x, curve.y, line=line, is_seed=True) for _, curve in members
        ]
        found = [
            interval(list(by_seed((r, unit(c.y[at])) for r, c in members).values()))
            for at in range(len(first.x))
        ]
        back = math.exp if unit is math.log else float
        y = [back(one.mean) for one in found]
        if are_heads:
            series.append(Series(label, look, first.x, y, True, line, _joined(bands)))
            continue
        band = None
        if math.isfinite(found[0].low):
            # An interval of two seeds can be wider than any number that can be drawn.
            lows = [back(min(one.low, MOST_DRAWN)) for one in found]
            band = lows, [back(min(one.high, MOST_DRAWN)) for one in found]
        windows = _average_band(y, members) if len(bands) == len(members) else None
        series.append(Series(label, look, first.x, y, True, line, band, windows))
    return series


def _joined(bands: Sequence[Band]) -> Band | None:
    """From the least to the most of all bands."""
    if not bands:
        return None
    lows, highs = zip(*bands, strict=True)
    return [min(at) for at in zip(*lows, strict=True)], [max(at) for at in zip(*highs, strict=True)]


def _average_band(y: Sequence[float], members: Sequence[tuple[Run, Curve]]) -> Band:
    """Bounds around y that are as far from it as the members' are from their own on average."""
    below = [fmean(c.y[at] - c.band[0][at] for _, c in members if c.band) for at in range(len(y))]
    above = [fmean(c.band[1][at] - c.y[at] for _, c in members if c.band) for at in range(len(y))]
    return (
        [value - by for value, by in zip(y, below, strict=True)],
        [value + by for value, by in zip(y, above, strict=True)],
    )


def gap_curves(
    named: NamedRuns, group: Group, curves: Sequence[Curve], unit: Callable[[float], float]
) -> list[tuple[EvaluatedRun, Curve]]:
    """Each finished run minus the mean of the reference kind's runs of its seed, at equal x."""
    baselines: dict[tuple[Any, ...], list[Curve]] = defaultdict(list)
    pairs = list(zip(group.members, curves, strict=True))
    for one, curve in pairs:
        if one.run.is_finished and one.run.kind == named.reference:
            baselines[one.run.seed, *_alike(one, curve)].append(curve)
    found = []
    for one, curve in pairs:
        baseline = baselines.get((one.run.seed, *_alike(one, curve)))
        if baseline and one.run.is_finished and one.run.kind != named.reference:
            of_reference = [
                fmean(unit(other.y[at]) for other in baseline) for at in range(len(curve.x))
            ]
            y = [unit(value) - base for value, base in zip(curve.y, of_reference, strict=True)]
            options = {name: curve.columns[name] for name in OPTIONS if name in curve.columns}
            x = next(iter(curve.columns))
            found.append((one, Curve({x: curve.x, **options, "gap": y})))
    return found
