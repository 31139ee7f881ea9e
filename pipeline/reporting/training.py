"""Figures of what training logged: loss, speed and state size."""

import math
from collections.abc import Iterator, Sequence
from statistics import fmean

from longhaul.pipeline.reporting.caveats import caveats, seeds_of
from longhaul.pipeline.reporting.comparison import BANDS, at_the_end, budgets, lines, training_loss
from longhaul.pipeline.reporting.drawing import Figure, Row, Series, series_of
from longhaul.pipeline.reporting.runs import Point, Run
from longhaul.pipeline.reporting.variants import LEADING_COLUMNS, NamedRuns, looks

_Mean = tuple[Point, int]
"""The mean of some updates, at the last one, and their number."""

_MOST_POINTS = 400
"""Most points of one curve; a column has no room for more."""

_EARLY_SHARE = 0.05
"""Share of the tokens, from the start, whose high losses do not extend the axis."""


def loss_against_tokens(named: NamedRuns) -> Iterator[Figure]:
    """One figure per training context."""
    for context in named.contexts:
        curves = [(run, _thinned(run.losses)) for run in named.at(context) if run.losses]
        if not curves:
            continue
        series, rows = [], list[Row]()
        for run, points in curves:
            x, y = [point.tokens for point, _ in points], [point.value for point, _ in points]
            series.append(series_of(named, run, x, y))
            rows += [
                [*named.leading_cells(run), point.step, point.tokens, updates, point.value]
                for point, updates in points
            ]
        runs = [run for run, _ in curves]
        last = {run.run_id: training_loss(run, run.tokens // run.context) for run in runs}
        finite = {run_id: loss for run_id, loss in last.items() if math.isfinite(loss)}
        reference = named.bigram_line(context=context)
        updates = max(count for _, points in curves for _, count in points)
        yield Figure(
            name=f"loss_against_tokens_{context:06d}{named.suffix}",
            title=f"Training loss, context {context:,}{named.where}",
            caption=(
                "The loss of every recorded update. "
                if updates == 1
                else f"Means of up to {updates:,} recorded updates; the line has gaps where none "
                "of them was finite. "
            )
            + f"One line a run. {seeds_of(named, runs)}",
            caveats=caveats(named, runs, finite, lambda run: run.tokens),
            reference=reference,
            bytes_per_token=named.bytes_per_token,
            x_label="tokens trained on",
            y_label="training loss (nats per token)",
            series=series,
            columns=[*LEADING_COLUMNS, "step", "tokens", "updates", "loss_nats"],
            rows=rows,
            x_axis="tokens",
            y_range=_settled_range(
                [points for _, points in curves], [reference[1]] if reference else []
            ),
        )


def loss_of_sources(named: NamedRuns) -> Iterator[Figure]:
    """Two figures per training context, of training and validation: a line for each source."""
    for context in named.contexts:
        for what in ("training", "validation"):
            curves = [
                (run, source, _thinned(points))
                for run in named.at(context)
                for source, points in (
                    run.source_losses if what == "training" else run.source_validation
                ).items()
                if points
            ]
            if curves:
                yield _loss_of_sources(named, context, what, curves)


def _loss_of_sources(
    named: NamedRuns, context: int, what: str, curves: Sequence[tuple[Run, str, list[_Mean]]]
) -> Figure:
    runs = list({run.run_id: run for run, _, _ in curves}.values())
    is_one = len({named.label(run) for run in runs}) == 1

    def label(run: Run, source: str) -> str:
        return source if is_one else f"{source}: {named.label(run)}"

    # A colour for each source.
    found = looks({label(run, source): source for run, source, _ in curves})
    return Figure(
        name=f"{what}_loss_of_sources_{context:06d}{named.suffix}",
        title=f"{what.capitalize()} loss of each source, context {context:,}{named.where}",
        caption="The mean over the tokens of each source. Losses of two sources are of different "
        f"text: only each one's own course says something. {seeds_of(named, runs)}",
        caveats=caveats(named, runs),
        bytes_per_token=named.bytes_per_token,
        x_label="tokens trained on, of all sources",
        y_label=f"{what} loss (nats per token)",
        series=[
            Series(
                label(run, source),
                found[label(run, source)],
                [point.tokens for point, _ in points],
                [point.value for point, _ in points],
                run.is_finished,
            )
            for run, source, points in curves
        ],
        columns=[*LEADING_COLUMNS, "source", "step", "tokens", "updates", "loss_nats"],
        rows=[
            [*named.leading_cells(run), source, point.step, point.tokens, count, point.value]
            for run, source, points in curves
            for point, count in points
        ],
        x_axis="tokens",
        y_range=_settled_range([points for _, _, points in curves], []),
    )


def speed_against_context(named: NamedRuns) -> Iterator[Figure]:
    """Tokens per second and device, over whole training runs."""
    runs = [run for run in named.runs if math.isfinite(run.speed)]
    if not runs:
        return
    devices = {run.run_id: run.config.trainer.world_size for run in runs}
    speeds = {run.run_id: run.speed / devices[run.run_id] for run in runs}
    hardware = sorted({run.hardware for run in runs})
    where = f"Not comparable, since machines differ: {', '.join(hardware)}."
    yield Figure(
        name=f"speed_against_context{named.suffix}",
        title=f"Speed of training{named.where}",
        caption="Median tokens per second of a run's updates, divided by its devices. "
        + (f"All on {hardware[0]}. " if len(hardware) == 1 else "")
        + f"{seeds_of(named, runs)} {BANDS}",
        caveats=[*([where] if len(hardware) > 1 else []), *caveats(named, runs)],
        y_label="speed (tokens/s per device)",
        series=lines(named, [(run, run.context, speeds[run.run_id]) for run in runs]),
        columns=[*LEADING_COLUMNS, "hardware", "devices", "tokens_per_second_a_device"],
        rows=[
            [*named.leading_cells(run), run.hardware, devices[run.run_id], speeds[run.run_id]]
            for run in runs
        ],
        y_axis="from zero",
    )


def loss_against_state(named: NamedRuns) -> Iterator[Figure]:
    """One figure per training context, since losses at different contexts are of different text."""
    for part in named.at_equal_tokens(in_each_context=True):
        for context in part.contexts:
            own = part.at(context)
            runs = [run for run in own if math.isfinite(run.final_loss) and run.state_bytes]
            if runs:
                yield _loss_against_state(part, context, runs)


def _loss_against_state(named: NamedRuns, context: int, runs: Sequence[Run]) -> Figure:
    return Figure(
        name=f"loss_against_state_{context:06d}{named.suffix}",
        title=f"Validation loss against state size, context {context:,}{named.where}",
        caption="State size of a sequence in all layers, in half precision without padding; "
        f"for keys and values, after {context:,} tokens. {budgets(runs)} "
        f"One point a run. {seeds_of(named, runs)}",
        caveats=caveats(named, runs, at_the_end(named).losses, lambda run: run.budget),
        reference=named.bigram_line(context=context),
        x_label="state size",
        y_label="validation loss (nats per token)",
        series=[series_of(named, run, [run.state_bytes], [run.final_loss], "") for run in runs],
        columns=[*LEADING_COLUMNS, "tokens", "state_bytes", "parameters", "validation_loss_nats"],
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
        bytes_per_token=named.bytes_per_token,
    )


def _thinned(points: Sequence[Point]) -> list[_Mean]:
    """Means over groups of successive points, placed at a group's last point, and finite counts."""
    size = -(-len(points) // _MOST_POINTS)
    thinned = []
    for start in range(0, len(points), size):
        group = points[start : start + size]
        values = [point.value for point in group if math.isfinite(point.value)]
        mean = fmean(values) if values else math.nan
        thinned.append((Point(group[-1].step, group[-1].tokens, mean), len(values)))
    return thinned


def _settled_range(
    curves: Sequence[Sequence[_Mean]], also: Sequence[float]
) -> tuple[float, float] | None:
    """The range of losses without the first updates, whose high losses would flatten the rest.

    It holds the values `also` too, such as that of a line.
    """
    settled = _EARLY_SHARE * max(points[-1][0].tokens for points in curves)
    values = [
        point.value
        for points in curves
        for point, _ in points
        if point.tokens >= settled and math.isfinite(point.value)
    ]
    if not values or min(values) == max(values):
        return None
    values += also
    margin = 0.05 * (max(values) - min(values))
    return min(values) - margin, max(values) + margin
