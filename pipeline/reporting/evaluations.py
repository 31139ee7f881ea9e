"""Figures of the results that `longhaul evaluate` logged.

Each has means over seeds, and a second one their paired gaps to a reference kind.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import Any

from longhaul.pipeline.evaluation.tables import Band, Chart, Curve, TaskTable
from longhaul.pipeline.reporting.caveats import caveats, extrapolation, seeds_of
from longhaul.pipeline.reporting.comparison import BANDS, by_seed
from longhaul.pipeline.reporting.drawing import Figure, Row, Series
from longhaul.pipeline.reporting.groups import OPTIONS, EvaluatedRun, Group, groups
from longhaul.pipeline.reporting.runs import Run
from longhaul.pipeline.reporting.seeds import interval
from longhaul.pipeline.reporting.variants import LEADING_COLUMNS, NamedRuns

_OVER_SEEDS = f"{BANDS} Dotted lines: the same band of single runs, over what is said above."

_LOG_AXIS_RATIO = 20.0
"""The axis is logarithmic if the highest perplexity is this many times the lowest."""

_LINE_STYLES = ("--", "-.", ":")
"""Of runs read with scaled positions."""

_MOST_DRAWN = 500.0
"""Nats up to which bounds and lines of perplexities are drawn; exp of more overflows."""


def charts(table: TaskTable, named: NamedRuns) -> Iterator[Figure]:
    """The figures that a task's file describes, of all runs that have the table."""
    for of_all in groups(named, table.name):
        every = {one.scaling for one in of_all.members}
        for scaling in sorted(every) if table.is_of_one_scaling else [None]:
            members = [one for one in of_all.members if scaling in (None, one.scaling)]
            group = of_all._replace(members=members)
            for chart in table.charts:
                curves = [chart.curve(rows) for rows in group.tables]
                if all(curve.x for curve in curves):  # models of one layer have no low ones
                    name = f"{chart.name}_{scaling}" if scaling else chart.name
                    yield from _figures(named, group, table, chart, name, curves)


def _windows(group: Group, curves: Sequence[Curve]) -> str:
    """The lengths of the windows whose positions are drawn."""
    windows = sorted({int(curve.columns["window"][0]) for curve in curves})
    is_beyond = windows[-1] > group.context
    return f" Windows: {', '.join(f'{window:,}' for window in windows)} tokens." + (
        "" if is_beyond else " No run was read beyond its training context."
    )


def _figures(
    named: NamedRuns,
    group: Group,
    table: TaskTable,
    chart: Chart,
    name: str,
    curves: Sequence[Curve],
) -> Iterator[Figure]:
    """The means over seeds of all variants, and their paired gaps to the reference kind.

    Losses and perplexities have the bigram model's as their reference.
    """
    title, y_axis = chart.title or table.title, chart.y_axis
    reference = None if chart.reference is None else chart.reference(group.tables)
    is_over_positions = "position" in curves[0].columns
    caption = chart.caption(group.tables)
    if "window" in curves[0].columns:
        caption += _windows(group, curves)
    is_score = y_axis == "score"
    is_loss = y_axis == "loss"
    is_perplexity = y_axis == "perplexity"
    if is_perplexity:
        lowest, highest = min(min(one.y) for one in curves), max(max(one.y) for one in curves)
        y_axis = "log" if highest > _LOG_AXIS_RATIO * lowest else "perplexity"
    is_in_nats = is_loss or is_perplexity
    # Of perplexities, the logarithms are averaged and compared: losses.
    unit = math.log if is_perplexity else float
    runs = [one.run for one in group.members]
    losses: dict[str, float] = {}
    for run, curve in zip(runs, curves, strict=True):
        # The first positions of a text are hard for any model: there, the end of a curve counts.
        values = curve.y[-1:] if is_over_positions else curve.y
        losses[run.run_id] = max(losses.get(run.run_id, -math.inf), *map(unit, values))
    why = caveats(
        named,
        runs,
        losses if is_in_nats else None,
        lambda run: group.members[0].tokens,  # all are after as many
        text=group.text,
        split_by=group.split_by,
    )
    if chart.is_over_tokens:
        why += extrapolation(group.context, max(x for curve in curves for x in curve.x))
    bigram = named.bigram_line(group.text, group.context)
    if bigram is not None and is_in_nats:
        label, loss = bigram
        reference = label, math.exp(min(loss, _MOST_DRAWN)) if is_perplexity else loss
    if y_axis == "share" and reference is not None:
        guessing = [
            named.label(run)
            for run, curve in zip(runs, curves, strict=True)
            if max((curve.band or (curve.y,))[0]) <= reference[1]
        ]
        if guessing:
            names = ", ".join(dict.fromkeys(guessing))
            why.append(f"No conclusion: not better than {reference[0]}: {names}.")
    rows = _table_rows(named, group, curves)
    drawn = Figure(
        name=group.name(name),
        title=f"{title}, {group.where}",
        caption=f"{caption} {group.checkpoints} {seeds_of(named, runs)}"
        + ("" if is_score else f" {_OVER_SEEDS}"),
        caveats=why,
        x_label=chart.x_label,
        y_label=chart.y_label,
        series=_mean_series(named, group, curves, unit, are_heads=is_score),
        columns=[*LEADING_COLUMNS, "seed", "step", "positions", "text", *curves[0].columns],
        rows=rows,
        x_axis=chart.x_axis,
        has_ticks=chart.has_ticks,
        y_axis=y_axis,
        trained_at=group.context if chart.is_over_tokens else None,
        reference=reference,
        bytes_per_token=named.bytes_per_token if is_loss and not group.text else math.nan,
    )
    yield drawn
    if is_score:
        return
    gaps = _gap_curves(named, group, curves, unit)
    if not gaps:
        return
    members, of_gaps = zip(*gaps, strict=True)
    paired = group._replace(members=list(members))
    of_seeds = seeds_of(named, [one.run for one in members])
    gap_unit = "share" if y_axis == "share" else "nats per token" if is_in_nats else chart.y_label
    yield dataclasses.replace(
        drawn,
        name=group.name(f"gap_{name}"),
        title=f"{title} minus {named.reference}'s, {group.where}",
        caption="Differences of runs with the same seed and data, read in the same way. "
        f"{of_seeds} {BANDS}",
        y_label=f"gap to {named.reference} ({gap_unit})",
        series=_mean_series(named, paired, of_gaps, float),
        columns=[*LEADING_COLUMNS, "seed", "step", "positions", "text", *of_gaps[0].columns],
        rows=_table_rows(named, paired, of_gaps),
        y_axis="loss" if is_in_nats else "score",
        reference=(named.reference, 0.0),
        bytes_per_token=named.bytes_per_token if is_in_nats and not group.text else math.nan,
    )


def _table_rows(named: NamedRuns, group: Group, curves: Sequence[Curve]) -> list[Row]:
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


def _mean_series(
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
            lows = [back(min(one.low, _MOST_DRAWN)) for one in found]
            band = lows, [back(min(one.high, _MOST_DRAWN)) for one in found]
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


def _gap_curves(
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
