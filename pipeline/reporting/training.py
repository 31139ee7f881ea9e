"""Figures of what training logged: loss, speed, size of states."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import fmean

from longhaul.pipeline.reporting.drawing import Figure, Row, Series
from longhaul.pipeline.reporting.runs import Point, Run
from longhaul.pipeline.reporting.variants import LEADING_COLUMNS, NamedRuns

_POINTS = 400
"""Of one curve: a column has room for no more."""

_SETTLED = 0.05
"""Share of the tokens after which losses decide how far the axis goes up."""


def loss_against_tokens(named: NamedRuns) -> Iterator[Figure]:
    """One figure for each training context."""
    for context in named.contexts:
        series, rows = [], list[Row]()
        curves = [(run, _thinned(run.losses)) for run in named.at(context) if run.losses]
        if not curves:
            continue
        for run, points in curves:
            series.append(
                Series(
                    named.label(run),
                    named.look(run),
                    [point.tokens for point, _ in points],
                    [point.value for point, _ in points],
                    run.is_finished,
                )
            )
            rows += [
                [*named.leading_cells(run), p.step, p.tokens, updates, p.value]
                for p, updates in points
            ]
        updates = max(count for _, points in curves for _, count in points)
        yield Figure(
            name=f"loss_against_tokens_{context:06d}",
            title=f"Training loss, context {context:,}",
            caption="The loss of every recorded update."
            if updates == 1
            else f"Means of up to {updates:,} recorded updates; where all of them were not finite, "
            "the line is broken.",
            x_label="tokens trained on",
            y_label="training loss (nats a token)",
            series=series,
            columns=[*LEADING_COLUMNS, "step", "tokens", "updates", "loss_nats"],
            rows=rows,
            x_axis="tokens",
            y_range=_settled_range([points for _, points in curves]),
        )


def loss_against_context(named: NamedRuns) -> Iterator[Figure]:
    """Figure 1 of the conformal-sympow paper."""
    runs = [run for run in named.runs if math.isfinite(run.final_loss)]
    if not runs:
        return
    yield Figure(
        name="loss_against_context",
        title="Validation loss against training context",
        caption=_budgets(runs),
        x_label="training context (tokens)",
        y_label="validation loss (nats a token)",
        series=_lines(named, [(run, run.context, run.final_loss) for run in runs]),
        columns=[*LEADING_COLUMNS, "tokens", "validation_loss_nats"],
        rows=[
            [*named.leading_cells(run), run.validation[-1].tokens, run.final_loss] for run in runs
        ],
        x_axis="context",
        x_ticks=[run.context for run in runs],
    )


def speed_against_context(named: NamedRuns) -> Iterator[Figure]:
    """Of whole training runs, a device."""
    runs = [run for run in named.runs if math.isfinite(run.speed)]
    if not runs:
        return
    speeds = {run.run_id: run.speed / run.config.trainer.world_size for run in runs}
    hardware = sorted({run.hardware for run in runs})
    where = f"All on {hardware[0]}."
    if len(hardware) > 1:
        where = f"On different machines, which are not to be compared: {', '.join(hardware)}."
    yield Figure(
        name="speed_against_context",
        title="Speed of training",
        caption=f"Tokens a second of a run, the median of its updates, by its devices. {where}",
        x_label="training context (tokens)",
        y_label="speed (tokens/s a device)",
        series=_lines(named, [(run, run.context, speeds[run.run_id]) for run in runs]),
        columns=[*LEADING_COLUMNS, "hardware", "devices", "tokens_per_second_a_device"],
        rows=[
            [
                *named.leading_cells(run),
                run.hardware,
                run.config.trainer.world_size,
                speeds[run.run_id],
            ]
            for run in runs
        ],
        x_axis="context",
        x_ticks=[run.context for run in runs],
        y_axis="from zero",
    )


def loss_against_state(named: NamedRuns) -> Iterator[Figure]:
    """One figure for each training context: losses at other contexts are of other text."""
    for context in named.contexts:
        runs = [run for run in named.at(context) if math.isfinite(run.final_loss)]
        if not runs:
            continue
        yield Figure(
            name=f"loss_against_state_{context:06d}",
            title=f"Validation loss against state, context {context:,}",
            caption="States of a sequence in all layers, in half precision without padding; "
            f"keys and values after {context:,} tokens. {_budgets(runs)}",
            x_label="size of the state",
            y_label="validation loss (nats a token)",
            series=[
                Series(
                    named.label(run),
                    named.look(run),
                    [run.state_bytes],
                    [run.final_loss],
                    run.is_finished,
                    line="",
                )
                for run in runs
            ],
            columns=[
                *LEADING_COLUMNS,
                "tokens",
                "state_bytes",
                "parameters",
                "validation_loss_nats",
            ],
            rows=[
                [
                    *named.leading_cells(run),
                    run.validation[-1].tokens,
                    run.state_bytes,
                    run.num_parameters,
                    run.final_loss,
                ]
                for run in runs
            ],
            x_axis="bytes",
        )


def _lines(named: NamedRuns, points: Sequence[tuple[Run, float, float]]) -> list[Series]:
    """All points; those of one finished variant are joined through their means."""
    series = []
    for label in sorted({named.label(run) for run, _, _ in points}):
        own = [point for point in points if named.label(point[0]) == label]
        run = own[0][0]
        look = named.look(run)
        x, y = [x for _, x, _ in own], [y for _, _, y in own]
        series.append(Series(label, look, x, y, run.is_finished, line=""))
        if run.is_finished and len(set(x)) > 1:
            means: dict[float, list[float]] = defaultdict(list)
            for _, at, value in own:
                means[at].append(value)
            found = sorted((at, fmean(values)) for at, values in means.items())
            series.append(Series(label, look, [at for at, _ in found], [m for _, m in found]))
    return series


def _thinned(points: Sequence[Point]) -> list[tuple[Point, int]]:
    """Means of equally many successive points, at the last of them, and how many were finite."""
    size = -(-len(points) // _POINTS)
    found = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        values = [point.value for point in part if math.isfinite(point.value)]
        mean = fmean(values) if values else math.nan
        found.append((Point(part[-1].step, part[-1].tokens, mean), len(values)))
    return found


def _settled_range(
    curves: Sequence[Sequence[tuple[Point, int]]],
) -> tuple[float, float] | None:
    """Of losses, without the first updates, which would flatten the others."""
    settled = _SETTLED * max(points[-1][0].tokens for points in curves)
    values = [
        point.value
        for points in curves
        for point, _ in points
        if point.tokens >= settled and math.isfinite(point.value)
    ]
    if not values or min(values) == max(values):
        return None
    margin = 0.05 * (max(values) - min(values))
    return min(values) - margin, max(values) + margin


def _budgets(runs: Sequence[Run]) -> str:
    budgets = sorted({run.validation[-1].tokens for run in runs})
    if len(budgets) == 1:
        return f"After {budgets[0]:,} tokens."
    return f"Not all after equally many tokens: {budgets[0]:,} to {budgets[-1]:,}."
