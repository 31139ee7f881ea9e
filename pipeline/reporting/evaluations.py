"""Figures and tables of the results that `longhaul evaluate` logged."""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from longhaul.pipeline.evaluation.figures import shown_positions, wilson_interval
from longhaul.pipeline.reporting.drawing import Figure, Row, Series, Table, YAxis
from longhaul.pipeline.reporting.runs import Evaluated, Run
from longhaul.pipeline.reporting.variants import LEADING_COLUMNS, NamedRuns

_MOST_POINTS = 300
"""Most points of a curve over positions; a column has no room for more."""

_LOG_AXIS_RATIO = 20.0
"""The axis is logarithmic if the highest perplexity is this many times the lowest."""

_LINE_STYLES = ("--", "-.", ":")
"""Of runs read with scaled positions."""


class _EvaluatedRun(NamedTuple):
    """A run, and its results of one task."""

    run: Run
    evaluated: Evaluated

    @property
    def scaling(self) -> str:
        return self.evaluated.label.scaling


class _Group(NamedTuple):
    """Results of one task on one text, from all runs with one training context."""

    context: int
    text: str
    members: list[_EvaluatedRun]

    def name(self, task: str) -> str:
        return f"{task}_{self.context:06d}" + (f"_{self.text}" if self.text else "")

    @property
    def where(self) -> str:
        return f"trained at {self.context:,}" + (f", on {self.text}" if self.text else "")

    @property
    def checkpoints(self) -> str:
        steps = sorted({one.evaluated.label.step for one in self.members})
        numbers = f"{steps[0]:,}" if len(steps) == 1 else f"{steps[0]:,} to {steps[-1]:,}"
        return f"Checkpoints of step {numbers}."


class _Curve(NamedTuple):
    """A run's columns by their names in the CSV; the first is x in the figure, the last is y."""

    columns: Mapping[str, Sequence[int] | Sequence[float]]
    band: tuple[Sequence[float], Sequence[float]] | None = None

    @property
    def x(self) -> Sequence[float]:
        return next(iter(self.columns.values()))

    @property
    def y(self) -> Sequence[float]:
        return list(self.columns.values())[-1]


def loss_by_position(named: NamedRuns) -> Iterator[Figure]:
    """Figure 2 of the conformal-sympow paper."""
    for group in _groups(named, "positions"):
        curves = []
        for one in group.members:
            rows = one.evaluated.rows
            shown = [rows[index] for index in shown_positions(len(rows), _MOST_POINTS).tolist()]
            curve = _curve(shown, "position", "loss_nats", "mean_up_to_here")
            # Positions of windows with another length are positions in another text.
            window = {"position": curve.x, "window": [len(rows)] * len(shown)}
            curves.append(_Curve(window | dict(curve.columns)))
        windows = sorted({len(one.evaluated.rows) for one in group.members})
        is_beyond = windows[-1] > group.context
        yield _figure(
            named,
            group,
            "loss_by_position",
            curves,
            title="Loss by position",
            caption="Mean loss over all positions up to x. Windows: "
            f"{', '.join(f'{window:,}' for window in windows)} tokens."
            + ("" if is_beyond else " No run was read beyond its training context."),
            x_label="position in the context (tokens)",
            y_label="mean loss up to there (nats per token)",
            has_ticks=False,
        )


def loss_in_windows(named: NamedRuns) -> Iterator[Figure]:
    """How much a longer context helps on the same tokens."""
    for group in _groups(named, "context"):
        yield _figure(
            named,
            group,
            "loss_in_windows",
            [_curve(one.evaluated.rows, "context", "loss_nats") for one in group.members],
            title="Loss in windows of each length",
            caption=f"Tokens per run: {_column_values(group, 'tokens')}, the same for all lengths.",
            x_label="window (tokens)",
            y_label="loss (nats per token)",
        )


def perplexity(named: NamedRuns) -> Iterator[Figure]:
    """Figure 4 of CoCA."""
    for group in _groups(named, "perplexity"):
        curves = [
            _curve(one.evaluated.rows, "window", "stride", "perplexity") for one in group.members
        ]
        values = [value for curve in curves for value in curve.y]
        yield _figure(
            named,
            group,
            "perplexity",
            curves,
            title="Perplexity of a sliding window",
            caption=f"Stride: {_column_values(group, 'stride')} tokens.",
            x_label="sliding window (tokens)",
            y_label="perplexity (per token)",
            y_axis="log" if max(values) > _LOG_AXIS_RATIO * min(values) else "linear",
        )


def passkey(named: NamedRuns) -> Iterator[Figure]:
    """Figure 5 of CoCA."""
    for group in _groups(named, "passkey"):
        curves = []
        for one in group.members:
            counts = _passkeys(one)
            right, prompts = zip(*counts.values(), strict=True)
            shares = [r / p for r, p in zip(right, prompts, strict=True)]
            low, high = zip(*itertools.starmap(wilson_interval, counts.values()), strict=True)
            columns = {"length": list(counts), "right": right, "prompts": prompts, "share": shares}
            curves.append(_Curve(columns, (low, high)))
        num_prompts = sorted({count for curve in curves for count in curve.columns["prompts"]})
        yield _figure(
            named,
            group,
            "passkey",
            curves,
            title="Passkeys retrieved",
            caption=f"Prompts per length: {', '.join(map(str, num_prompts))}; bands: Wilson 95 %.",
            x_label="length of the prompt (tokens)",
            y_label="passkeys retrieved (share)",
            y_axis="share",
        )


def ntk_tables(named: NamedRuns) -> Iterator[Table]:
    """Tables 4 and 5 of CoCA, if any run was read with scaled positions."""
    for task, title, read in (
        ("perplexity", "Perplexity of a sliding window", _perplexities),
        ("passkey", "Passkeys retrieved (%)", _percentages),
    ):
        for group in _groups(named, task):
            if not any(one.scaling for one in group.members):
                continue
            values_of = [(one, read(one)) for one in group.members]
            lengths = sorted({length for _, values in values_of for length in values})
            yield Table(
                name=group.name(f"ntk_{task}"),
                title=f"{title}, {group.where}",
                caption="Columns are lengths of the "
                + (
                    f"window, tokens; stride: {_column_values(group, 'stride')}"
                    if task == "perplexity"
                    else "prompt, tokens"
                ),
                columns=["run", "variant", "step", "positions", *map(str, lengths)],
                rows=[
                    [
                        one.run.name,
                        named.label(one.run),
                        one.evaluated.label.step,
                        one.scaling or "as trained",
                        *(values.get(length, "") for length in lengths),
                    ]
                    for one, values in values_of
                ],
            )


def _groups(named: NamedRuns, task: str) -> Iterator[_Group]:
    groups: dict[tuple[int, str], list[_EvaluatedRun]] = defaultdict(list)
    for run in named.runs:
        for evaluated in run.evaluations[task]:
            if evaluated.rows:
                groups[run.context, evaluated.label.text].append(_EvaluatedRun(run, evaluated))
    for (context, text), members in sorted(groups.items()):
        members.sort(key=lambda one: (named.label(one.run), one.run.name, one.scaling))
        yield _Group(context, text, members)


def _column_values(group: _Group, column: str) -> str:
    """All values of a column of whole numbers, as text."""
    values = {int(row[column]) for one in group.members for row in one.evaluated.rows}
    return ", ".join(f"{value:,}" for value in sorted(values))


def _figure(
    named: NamedRuns,
    group: _Group,
    task: str,
    curves: Sequence[_Curve],
    *,
    title: str,
    caption: str,
    x_label: str,
    y_label: str,
    y_axis: YAxis = "linear",
    has_ticks: bool = True,
) -> Figure:
    """One curve per member of the group; with `has_ticks` the axis has a number at each point."""
    scalings = sorted({one.scaling for one in group.members} - {""})
    series, rows = [], list[Row]()
    for one, curve in zip(group.members, curves, strict=True):
        line = "-"
        if one.scaling:
            line = _LINE_STYLES[scalings.index(one.scaling) % len(_LINE_STYLES)]
        series.append(
            Series(
                named.label(one.run) + (f", {one.scaling}" if one.scaling else ""),
                named.look(one.run),
                curve.x,
                curve.y,
                one.run.is_finished,
                line,
                curve.band,
            )
        )
        setting = [*named.leading_cells(one.run), one.evaluated.label.step, one.scaling, group.text]
        rows += [[*setting, *row] for row in zip(*curve.columns.values(), strict=True)]
    return Figure(
        name=group.name(task),
        title=f"{title}, {group.where}",
        caption=f"{caption} {group.checkpoints}",
        x_label=x_label,
        y_label=y_label,
        series=series,
        columns=[*LEADING_COLUMNS, "step", "positions", "text", *curves[0].columns],
        rows=rows,
        x_axis="context",
        x_ticks=[int(x) for curve in curves for x in curve.x] if has_ticks else (),
        y_axis=y_axis,
        trained_at=group.context,
    )


def _curve(rows: Sequence[Mapping[str, str]], x: str, *others: str) -> _Curve:
    """The curve of these columns of an evaluation's table."""
    columns: dict[str, Sequence[int] | Sequence[float]] = {x: [int(row[x]) for row in rows]}
    for name in others:
        read = int if name == "stride" else float
        columns[name] = [read(row[name]) for row in rows]
    return _Curve(columns)


def _passkeys(one: _EvaluatedRun) -> dict[int, tuple[int, int]]:
    """The numbers of right answers and of prompts at each length, over all depths."""
    counts: dict[int, tuple[int, int]] = {}
    for row in one.evaluated.rows:
        right, count = counts.get(int(row["length"]), (0, 0))
        counts[int(row["length"])] = right + int(row["right"]), count + int(row["prompts"])
    return dict(sorted(counts.items()))


def _perplexities(one: _EvaluatedRun) -> dict[int, float]:
    return {int(row["window"]): float(row["perplexity"]) for row in one.evaluated.rows}


def _percentages(one: _EvaluatedRun) -> dict[int, float]:
    return {length: 100 * right / count for length, (right, count) in _passkeys(one).items()}
