"""Figures of the results that `longhaul evaluate` logged."""

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from longhaul.pipeline.evaluation.figures import (
    enlarged_from,
    shown_positions,
    wilson_interval,
)
from longhaul.pipeline.reporting.caveats import caveats, extrapolation, seeds_of
from longhaul.pipeline.reporting.comparison import BANDS
from longhaul.pipeline.reporting.curves import (
    MOST_DRAWN,
    Curve,
    gap_curves,
    mean_series,
    table_rows,
)
from longhaul.pipeline.reporting.drawing import Figure, XAxis, YAxis
from longhaul.pipeline.reporting.groups import (
    EvaluatedRun,
    Group,
    column_values,
    groups,
    passkeys,
    protocol,
)
from longhaul.pipeline.reporting.variants import LEADING_COLUMNS, NamedRuns

_OVER_SEEDS = f"{BANDS} Dotted lines: the same band of single runs, over what is said above."

_MOST_POINTS = 300
"""Most points of a curve over positions; a column has no room for more."""

_LOG_AXIS_RATIO = 20.0
"""The axis is logarithmic if the highest perplexity is this many times the lowest."""


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
            curves.append(Curve(columns | dict(curve.columns), curve.band))
        widths = sorted({int(c.columns["last"][0]) for c in curves})
        yield from _figures(
            named,
            group,
            "loss_at_position",
            curves,
            title="Loss at a position",
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
            curves.append(Curve(window | dict(curve.columns), band))
        yield from _figures(
            named,
            group,
            "loss_up_to_position",
            curves,
            title="Mean loss up to a position",
            caption="Mean over all positions up to x; bands: standard error over windows. "
            f"{_windows(group, curves)}",
            x_label="position in the context (tokens)",
            y_label="mean loss (nats per token)",
            has_ticks=False,
        )


def _windows(group: Group, curves: Sequence[Curve]) -> str:
    """The lengths of the windows whose positions are drawn."""
    windows = sorted({int(curve.columns["window"][0]) for curve in curves})
    is_beyond = windows[-1] > group.context
    return f"Windows: {', '.join(f'{window:,}' for window in windows)} tokens." + (
        "" if is_beyond else " No run was read beyond its training context."
    )


def loss_in_windows(named: NamedRuns) -> Iterator[Figure]:
    """How much a longer context helps on the same tokens."""
    for group in groups(named, "context"):
        yield from _figures(
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
        yield from _figures(
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
            curves.append(Curve(columns | {"share": shares}, (low, high)))
        num_prompts = sorted({count for curve in curves for count in curve.columns["prompts"]})
        yield from _figures(
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
            share = [row["right"] / row["queries"] for row in rows]
            curves.append(Curve(columns | {"share": share}, (columns["low"], columns["high"])))
        chances = {row["chance"] for one in group.members for row in one.evaluated.rows}
        yield from _figures(
            named,
            group,
            "recall",
            curves,
            title="Values recalled",
            caption="Zero-shot recall: a sequence holds pairs of tokens, then the same pairs in "
            "another order. Bands: Wilson 95 %, from the standard error over sequences.",
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
                yield from _figures(
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


def _score_curve(one: EvaluatedRun, is_low: bool, is_end: bool) -> Curve:
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
    return Curve(columns, (low, high))


def _layers(group: Group, is_low: bool) -> str:
    """The layers of a figure, counted from 1."""
    found = sorted({row["layer"] for one in group.members for row in one.evaluated.rows})
    return ", ".join(map(str, found[:-1] if is_low else found[-1:]))


def _figures(
    named: NamedRuns,
    group: Group,
    task: str,
    curves: Sequence[Curve],
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
) -> Iterator[Figure]:
    """The means over seeds of all variants, and their paired gaps to the reference kind.

    With `has_ticks` the axis has a number at each point; one over tokens marks the training
    context. `reference` is that of the figure; losses and perplexities have the bigram model's.
    """
    is_score = y_axis == "score"
    is_loss = y_axis == "loss"
    is_perplexity = y_axis in ("perplexity", "log")
    # Of perplexities, what is averaged and compared are losses.
    unit = math.log if is_perplexity else float
    runs = [one.run for one in group.members]
    losses: dict[str, float] = {}
    for run, curve in zip(runs, curves, strict=True):
        # The first positions of a text are hard for any model: there, the end of a curve counts.
        values = [curve.y[-1]] if "position" in curve.columns else curve.y
        losses[run.run_id] = max(losses.get(run.run_id, -math.inf), *map(unit, values))
    why = caveats(
        named,
        runs,
        losses if is_loss or is_perplexity else None,
        lambda run: max(one.tokens for one in group.members if one.run is run),
        text=group.text,
        split_by=group.split_by,
    )
    if is_over_tokens:
        why += extrapolation(group.context, max(x for curve in curves for x in curve.x))
    bigram = named.bigram_line(group.text, group.context)
    if bigram is not None and (is_loss or is_perplexity):
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
    ticks = [int(x) for curve in curves for x in curve.x] if has_ticks else ()
    seeds = seeds_of(named, runs)
    drawn = Figure(
        name=group.name(task),
        title=f"{title}, {group.where}",
        caption=f"{caption} {group.checkpoints} {seeds}" + ("" if is_score else f" {_OVER_SEEDS}"),
        caveats=why,
        x_label=x_label,
        y_label=y_label,
        series=mean_series(named, group, curves, unit, are_heads=is_score),
        columns=[*LEADING_COLUMNS, "seed", "step", "positions", "text", *curves[0].columns],
        rows=rows,
        x_axis=x_axis,
        x_ticks=ticks,
        y_axis=y_axis,
        trained_at=group.context if is_over_tokens else None,
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
    what = "share" if y_axis == "share" else "nats per token"
    yield dataclasses.replace(
        drawn,
        name=group.name(f"gap_{task}"),
        title=f"{title} minus {named.reference}'s, {group.where}",
        caption="Differences of runs with the same seed and data, read in the same way. "
        f"{of_seeds} {BANDS}",
        y_label=f"gap to {named.reference} ({what})",
        series=mean_series(named, paired, of_gaps, float),
        columns=[*LEADING_COLUMNS, "seed", "step", "positions", "text", *of_gaps[0].columns],
        rows=table_rows(named, paired, of_gaps),
        x_ticks=[int(x) for curve in of_gaps for x in curve.x] if has_ticks else (),
        y_axis="score" if y_axis == "share" else "loss",
        reference=(named.reference, 0.0),
        bytes_per_token=math.nan if y_axis == "share" or group.text else named.bytes_per_token,
    )


def _curve(rows: Sequence[Mapping[str, Any]], x: str, *others: str) -> Curve:
    """The curve of these columns of an evaluation's table."""
    return Curve({name: [row[name] for row in rows] for name in (x, *others)})


def _with_errors(one: EvaluatedRun, x: str, *others: str) -> Curve:
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
