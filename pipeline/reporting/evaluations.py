"""Figures of the results that `longhaul evaluate` logged."""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from longhaul.pipeline.evaluation.figures import (
    enlarged_from,
    shown_positions,
    wilson_interval,
)
from longhaul.pipeline.reporting.drawing import Figure, Row, Series, XAxis, YAxis
from longhaul.pipeline.reporting.groups import (
    EvaluatedRun,
    Group,
    column_values,
    groups,
    passkeys,
    protocol,
)
from longhaul.pipeline.reporting.variants import LEADING_COLUMNS, NamedRuns

_MOST_POINTS = 300
"""Most points of a curve over positions; a column has no room for more."""

_LOG_AXIS_RATIO = 20.0
"""The axis is logarithmic if the highest perplexity is this many times the lowest."""

_SAME_LOSS = 0.005
"""Nats by which a bigram model's loss differs at most where it is drawn as one line."""

_LINE_STYLES = ("--", "-.", ":")
"""Of runs read with scaled positions."""


class _Curve(NamedTuple):
    """A run's columns by their names in the CSV; the first is x in the figure, the last is y."""

    columns: Mapping[str, Sequence[Any]]
    band: tuple[Sequence[float], Sequence[float]] | None = None

    @property
    def x(self) -> Sequence[float]:
        return next(iter(self.columns.values()))

    @property
    def y(self) -> Sequence[float]:
        return list(self.columns.values())[-1]


def loss_at_position(named: NamedRuns) -> Iterator[Figure]:
    """Figure 2 of the conformal-sympow paper."""
    for group in groups(named, "loss_in_bins"):
        curves = []
        for one in group.members:
            rows = one.evaluated.rows
            columns = {
                "position": [(row["first"] + row["last"]) / 2 for row in rows],
                "first": [row["first"] for row in rows],
                "last": [row["last"] for row in rows],
                "window": [rows[-1]["last"]] * len(rows),
            }
            curve = _with_errors(one, "first", "standard_error", "loss_nats")
            curves.append(_Curve(columns | dict(curve.columns), curve.band))
        widths = sorted({int(c.columns["last"][0]) for c in curves})
        yield _figure(
            named,
            group,
            "loss_at_position",
            curves,
            title="Loss at a position",
            reference=_bigram_line(group),
            caption=f"Means over {' or '.join(f'{width:,}' for width in widths)} positions each; "
            f"bands: standard error over windows. {_windows(group, curves)}",
            x_label="position in the context (tokens)",
            y_label="loss (nats per token)",
            x_axis="position",
        )


def loss_up_to_position(named: NamedRuns) -> Iterator[Figure]:
    """The mean over all that a document of each length has."""
    for group in groups(named, "positions"):
        curves = []
        for one in group.members:
            rows = one.evaluated.rows
            shown = [rows[index] for index in shown_positions(len(rows), _MOST_POINTS).tolist()]
            names = ["loss_nats", "standard_error", "standard_error_up_to_here", "mean_up_to_here"]
            curve = _curve(shown, "position", *names)
            # Positions of windows with another length are positions in another text.
            window = {"position": curve.x, "window": [len(rows)] * len(shown)}
            band = _band(curve.y, curve.columns["standard_error_up_to_here"])
            curves.append(_Curve(window | dict(curve.columns), band))
        yield _figure(
            named,
            group,
            "loss_up_to_position",
            curves,
            title="Mean loss up to a position",
            reference=_bigram_line(group),
            caption="Mean over all positions up to x; bands: standard error over windows. "
            f"{_windows(group, curves)}",
            x_label="position in the context (tokens)",
            y_label="mean loss (nats per token)",
            has_ticks=False,
        )


def _windows(group: Group, curves: Sequence[_Curve]) -> str:
    """The lengths of the windows whose positions are drawn."""
    windows = sorted({int(curve.columns["window"][0]) for curve in curves})
    is_beyond = windows[-1] > group.context
    return f"Windows: {', '.join(f'{window:,}' for window in windows)} tokens." + (
        "" if is_beyond else " No run was read beyond its training context."
    )


def loss_in_windows(named: NamedRuns) -> Iterator[Figure]:
    """How much a longer context helps on the same tokens."""
    for group in groups(named, "context"):
        yield _figure(
            named,
            group,
            "loss_in_windows",
            [_with_errors(one, "context", "loss_nats") for one in group.members],
            title="Loss in windows of each length",
            caption=f"Tokens per run: {column_values(group, 'tokens')}, the same for all lengths; "
            "bands: standard error over windows as long as the longest.",
            x_label="window (tokens)",
            y_label="loss (nats per token)",
        )


def perplexity(named: NamedRuns) -> Iterator[Figure]:
    """Figure 4 of CoCA."""
    for group in groups(named, "perplexity"):
        names = ["stride", "document_tokens", "bos", "perplexity"]
        curves = [_with_errors(one, "window", *names) for one in group.members]
        values = [value for curve in curves for value in curve.y]
        yield _figure(
            named,
            group,
            "perplexity",
            curves,
            title="Perplexity of a sliding window",
            caption=f"Tokens scored per run: {column_values(group, 'tokens')}; "
            f"{protocol(group, 'perplexity')}; bands: standard error over these parts of documents "
            "or, where all is read, over windows as long as the longest.",
            x_label="sliding window (tokens)",
            y_label="perplexity (per token)",
            y_axis="log" if max(values) > _LOG_AXIS_RATIO * min(values) else "perplexity",
        )


def passkey(named: NamedRuns) -> Iterator[Figure]:
    """Figure 5 of CoCA."""
    for group in groups(named, "passkey"):
        curves = []
        for one in group.members:
            counts = passkeys(one)
            right, prompts = zip(*counts.values(), strict=True)
            shares = [r / p for r, p in zip(right, prompts, strict=True)]
            low, high = zip(*itertools.starmap(wilson_interval, counts.values()), strict=True)
            columns = {"length": list(counts), "right": right, "prompts": prompts}
            # All rows of a table are of the same options.
            for name in ("depths", "bos"):
                columns[name] = [one.evaluated.rows[0][name]] * len(counts)
            curves.append(_Curve(columns | {"share": shares}, (low, high)))
        num_prompts = sorted({count for curve in curves for count in curve.columns["prompts"]})
        yield _figure(
            named,
            group,
            "passkey",
            curves,
            title="Passkeys retrieved",
            caption=f"Prompts per length: {', '.join(map(str, num_prompts))}; "
            f"{protocol(group, 'passkey')}; bands: Wilson 95 %.",
            x_label="length of the prompt (tokens)",
            y_label="passkeys retrieved (share)",
            y_axis="share",
        )


def recall(named: NamedRuns) -> Iterator[Figure]:
    """Zero-shot recall by the number of pairs."""
    for group in groups(named, "recall"):
        curves = []
        for one in group.members:
            rows = one.evaluated.rows
            names = ("pairs", "right", "queries", "low", "high")
            columns = {name: [row[name] for row in rows] for name in names}
            low, high = columns["low"], columns["high"]
            band = (low, high) if all(map(math.isfinite, [*low, *high])) else None
            share = [row["right"] / row["queries"] for row in rows]
            curves.append(_Curve(columns | {"share": share}, band))
        chances = {row["chance"] for one in group.members for row in one.evaluated.rows}
        yield _figure(
            named,
            group,
            "recall",
            curves,
            title="Values recalled",
            caption="Zero-shot recall: a sequence holds pairs of tokens, then the same pairs in "
            "another order. Bands, where the table has them: Wilson 95 %, from the standard error "
            "over sequences.",
            x_label="pairs in the sequence",
            y_label="values recalled (share)",
            y_axis="share",
            is_over_tokens=False,
            reference=("random guess", fmean(chances)),
        )


def scores(named: NamedRuns) -> Iterator[Figure]:
    """Figure 8 of CoCA: low layers and the last, whole and enlarged, for each scaling."""
    for of_all in groups(named, "scores"):
        for scaling in sorted({one.scaling for one in of_all.members}):
            members = [one for one in of_all.members if one.scaling == scaling]
            group = of_all._replace(members=members)
            for is_low, is_end in itertools.product((True, False), repeat=2):
                curves = [_score_curve(one, is_low, is_end) for one in members]
                if not all(curve.x for curve in curves):
                    continue  # models of one layer have no others
                layers = "low layers" if is_low else "last layer"
                parts = ["scores", "low" if is_low else "last", "end" if is_end else "", scaling]
                yield _figure(
                    named,
                    group,
                    "_".join(filter(None, parts)),
                    curves,
                    title=f"Scores of the last token, {layers}{', enlarged' if is_end else ''}",
                    caption="Mean over heads and layers; bands: from the least to the most of "
                    f"them. Layers: {_layers(group, is_low)}; "
                    f"{protocol(group, 'scores')}.",
                    x_label="position of the key (tokens)",
                    y_label="attention score before the softmax",
                    y_axis="score",
                    x_axis="position",
                    is_over_tokens=False,
                )


def _score_curve(one: EvaluatedRun, is_low: bool, is_end: bool) -> _Curve:
    """Scores by key, over the last layer or over all others."""
    rows = one.evaluated.rows
    last = max(row["layer"] for row in rows)
    first = enlarged_from(max(row["key"] for row in rows)) if is_end else 1
    by_key: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if (row["layer"] < last) is is_low and row["key"] >= first:
            by_key[row["key"]].append(row)
    keys = sorted(by_key)
    low = [min(row["least_of_heads"] for row in by_key[key]) for key in keys]
    high = [max(row["most_of_heads"] for row in by_key[key]) for key in keys]
    mean = [fmean(row["score"] for row in by_key[key]) for key in keys]
    bos = [rows[0]["bos"]] * len(keys)
    columns = {"key": keys, "least": low, "most": high, "bos": bos, "score": mean}
    return _Curve(columns, (low, high))


def _layers(group: Group, is_low: bool) -> str:
    """The layers of a figure, counted from 1."""
    found = sorted({row["layer"] for one in group.members for row in one.evaluated.rows})
    return ", ".join(map(str, found[:-1] if is_low else found[-1:]))


def _bigram_line(group: Group) -> tuple[str, float] | None:
    """The bigram model's loss, if it has been measured and is the same for all runs of a group."""
    losses = [
        bigram.rows[0]["value"]
        for one in group.members
        for bigram in one.run.evaluations["bigram"]
        if bigram.label.text == group.text
    ]
    if not losses or max(losses) - min(losses) > _SAME_LOSS:
        return None
    return "bigram model", fmean(losses)


def _figure(
    named: NamedRuns,
    group: Group,
    task: str,
    curves: Sequence[_Curve],
    *,
    title: str,
    caption: str,
    x_label: str,
    y_label: str,
    y_axis: YAxis = "loss",
    x_axis: XAxis = "context",
    has_ticks: bool = True,
    is_over_tokens: bool = True,
    reference: tuple[str, float] | None = None,
) -> Figure:
    """One curve per member of the group.

    With `has_ticks` the axis has a number at each point; one over tokens marks the training
    context. `reference` is that of the figure.
    """
    every = {one.scaling for one in group.members}
    # Where all have one scaling, nothing needs to be told apart.
    scalings = sorted(every - {""}) if len(every) > 1 else []
    series, rows = [], list[Row]()
    for one, curve in zip(group.members, curves, strict=True):
        line = "-" if scalings else None
        if one.scaling in scalings:
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
        x_axis=x_axis,
        x_ticks=[int(x) for curve in curves for x in curve.x] if has_ticks else (),
        y_axis=y_axis,
        trained_at=group.context if is_over_tokens else None,
        reference=reference,
    )


def _curve(rows: Sequence[Mapping[str, Any]], x: str, *others: str) -> _Curve:
    """The curve of these columns of an evaluation's table."""
    return _Curve({name: [row[name] for row in rows] for name in (x, *others)})


def _with_errors(one: EvaluatedRun, x: str, *others: str) -> _Curve:
    """A curve of losses or perplexities, with a band of the standard error of the loss."""
    rows = one.evaluated.rows
    curve = _curve(rows, x, *others)
    errors = [row.get("standard_error", math.nan) for row in rows]
    if "perplexity" in others:
        errors = [value * error for value, error in zip(curve.y, errors, strict=True)]
    return curve._replace(band=_band(curve.y, errors))


def _band(
    y: Sequence[float], errors: Sequence[float]
) -> tuple[Sequence[float], Sequence[float]] | None:
    """The lower and upper bounds of y; None where there are no errors, as of one window."""
    if not all(map(math.isfinite, errors)):
        return None
    pairs = list(zip(y, errors, strict=True))
    return [value - error for value, error in pairs], [value + error for value, error in pairs]
