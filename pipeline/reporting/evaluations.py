"""Figures of the results that `longhaul evaluate` logged."""

import dataclasses
import math
from collections.abc import Iterator, Sequence

from longhaul.pipeline.evaluation.tables import Chart, Curve, TaskTable
from longhaul.pipeline.reporting.caveats import caveats, extrapolation, seeds_of
from longhaul.pipeline.reporting.comparison import BANDS
from longhaul.pipeline.reporting.curves import MOST_DRAWN, gap_curves, mean_series, table_rows
from longhaul.pipeline.reporting.drawing import Figure
from longhaul.pipeline.reporting.groups import Group, groups
from longhaul.pipeline.reporting.variants import LEADING_COLUMNS, NamedRuns

_OVER_SEEDS = f"{BANDS} Dotted lines: the same band of single runs, over what is said above."

_LOG_AXIS_RATIO = 20.0
"""The axis is logarithmic if the highest perplexity is this many times the lowest."""


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
    if is_over_positions:
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
        lambda run: max(one.tokens for one in group.members if one.run is run),
        text=group.text,
        split_by=group.split_by,
    )
    if chart.is_over_tokens:
        why += extrapolation(group.context, max(x for curve in curves for x in curve.x))
    bigram = named.bigram_line(group.text, group.context)
    if bigram is not None and is_in_nats:
        label, loss = bigram
        reference = label, math.exp(min(loss, MOST_DRAWN)) if is_perplexity else loss
    if y_axis == "share" and reference is not None:
        guessing = [
            named.label(run)
            for run, curve in zip(runs, curves, strict=True)
            if max((curve.band or (curve.y,))[0]) <= reference[1]
        ]
        if guessing:
            names = ", ".join(dict.fromkeys(guessing))
            why.append(f"No conclusion: not better than {reference[0]}: {names}.")
    rows = table_rows(named, group, curves)
    drawn = Figure(
        name=group.name(name),
        title=f"{title}, {group.where}",
        caption=f"{caption} {group.checkpoints} {seeds_of(named, runs)}"
        + ("" if is_score else f" {_OVER_SEEDS}"),
        caveats=why,
        x_label=chart.x_label,
        y_label=chart.y_label,
        series=mean_series(named, group, curves, unit, are_heads=is_score),
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
    gaps = gap_curves(named, group, curves, unit)
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
        series=mean_series(named, paired, of_gaps, float),
        columns=[*LEADING_COLUMNS, "seed", "step", "positions", "text", *of_gaps[0].columns],
        rows=table_rows(named, paired, of_gaps),
        y_axis="loss" if is_in_nats else "score",
        reference=(named.reference, 0.0),
        bytes_per_token=named.bytes_per_token if is_in_nats and not group.text else math.nan,
    )
