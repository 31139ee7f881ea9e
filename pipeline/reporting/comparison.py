"""Figures of all kinds against the training context: losses, and gaps to a reference kind."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from longhaul.pipeline.evaluation.figures import standard_error
from longhaul.pipeline.reporting.caveats import caveats, seeds_of
from longhaul.pipeline.reporting.drawing import Figure, Row, Series, Table
from longhaul.pipeline.reporting.runs import Run
from longhaul.pipeline.reporting.seeds import interval
from longhaul.pipeline.reporting.variants import LEADING_COLUMNS, NamedRuns

_TAIL = 0.1
"""Share of the sequences, up to the last, whose training losses are averaged.

The conformal-sympow paper does not say how the single values of its figure 1 were taken.
"""

BANDS = "Bands: 95 % t-intervals over seeds, cut off where they would hide the rest."

_SEQUENCES = "Mean training loss over the last tenth of the first {:,} sequences of each run."


@dataclass(frozen=True)
class Measure:
    """One loss of each run that has it, in nats per token, by run id."""

    losses: Mapping[str, float]
    pairs: Mapping[str, tuple[str | int, ...]]
    """What a run has in common with the run of the reference kind that it is compared with."""

    tokens: Callable[[Run], int]
    """After how many a run has this loss."""


def loss_at_sequences(named: NamedRuns) -> Iterator[Figure]:
    """Figure 1 of the conformal-sympow paper."""
    for part in named.at_equal_tokens(in_each_context=True):
        measure = at_sequences(part)
        runs = [run for run in part.runs if run.run_id in measure.losses]
        if not runs:
            continue
        missing = len([run for run in part.runs if run.losses]) - len(runs)
        left_out = f" Left out: {missing} runs, which have read less or diverged."
        yield Figure(
            name=f"loss_at_sequences{part.suffix}",
            title=f"Training loss after {part.sequences:,} sequences{part.where}",
            caption=_SEQUENCES.format(part.sequences)
            + f" A longer context has read proportionally more tokens. {seeds_of(part, runs)} "
            + BANDS
            + (left_out if missing else ""),
            caveats=caveats(part, runs, measure.losses, measure.tokens),
            reference=part.bigram_line(),
            y_label="training loss (nats per token)",
            series=lines(part, [(run, run.context, measure.losses[run.run_id]) for run in runs]),
            columns=[*LEADING_COLUMNS, "seed", "sequences", "training_loss_nats"],
            rows=[
                [*part.leading_cells(run), run.seed, part.sequences, measure.losses[run.run_id]]
                for run in runs
            ],
            bytes_per_token=part.bytes_per_token,
        )


def loss_against_context(named: NamedRuns) -> Iterator[Figure]:
    """What is left at the end of training, one figure for each number of tokens."""
    for part in named.at_equal_tokens():
        runs = [run for run in part.runs if math.isfinite(run.final_loss)]
        if not runs:
            continue
        yield Figure(
            name=f"loss_against_context{part.suffix}",
            title=f"Validation loss against training context{part.where}",
            caption=f"{budgets(runs)} {seeds_of(part, runs)} {BANDS}",
            caveats=caveats(part, runs, at_the_end(part).losses, lambda run: run.budget),
            reference=part.bigram_line(),
            y_label="validation loss (nats per token)",
            series=lines(part, [(run, run.context, run.final_loss) for run in runs]),
            columns=[*LEADING_COLUMNS, "seed", "tokens", "validation_loss_nats"],
            rows=[
                [*part.leading_cells(run), run.seed, run.validation[-1].tokens, run.final_loss]
                for run in runs
            ],
            bytes_per_token=part.bytes_per_token,
        )


def gap_at_sequences(named: NamedRuns) -> Iterator[Figure]:
    """What figure 1 of the conformal-sympow paper shows: the gap to softmax."""
    for part in named.at_equal_tokens(in_each_context=True):
        yield from _gap_figure(
            part,
            at_sequences(part),
            "gap_at_sequences",
            f"Training loss minus {part.reference}'s, after {part.sequences:,} sequences",
            _SEQUENCES.format(part.sequences),
        )


def gap_against_context(named: NamedRuns) -> Iterator[Figure]:
    """The gap to the reference kind at equal tokens."""
    for part in named.at_equal_tokens(in_each_context=True):
        yield from _gap_figure(
            part,
            at_the_end(part),
            "gap_against_context",
            f"Validation loss minus {part.reference}'s, after equal tokens",
            "Last validation.",
        )


def seeds_table(named: NamedRuns) -> Iterator[Table]:
    """Means over seeds of both losses and of both gaps, of finished runs."""
    for part in named.at_equal_tokens(in_each_context=True):
        measures = at_sequences(part), at_the_end(part)
        found = [by_setting(part, measure.losses) for measure in measures]
        gaps = [by_setting(part, paired_gaps(part, measure)) for measure in measures]
        rows = list[Row]()
        for setting in sorted({key for of_measure in found for key in of_measure}):
            seeds = max(len(of_measure.get(setting, ())) for of_measure in found)
            row: list[str | int | float] = [*setting, seeds]
            for pair in zip(found, gaps, strict=True):
                for values in (list(one.get(setting, {}).values()) for one in pair):
                    row += [fmean(values) if values else math.nan, standard_error(values)]
            rows.append(row)
        if rows:
            yield Table(
                name=f"seeds{part.suffix}",
                title=f"Means over seeds{part.where}",
                caption=f"Nats per token; training loss after {part.sequences:,} sequences, last "
                "validation loss; errors are standard errors over seeds. A gap is the mean "
                f"difference to {part.reference} runs of the same seed, context and data",
                caveats=caveats(part, part.runs, at_the_end(part).losses),
                columns=[
                    *("variant", "training context", "tokens", "seeds"),
                    *(
                        what + loss
                        for loss in ("training loss", "validation loss")
                        for what in ("", "error of ", "gap in ", "error of gap in ")
                    ),
                ],
                rows=rows,
            )


def at_sequences(named: NamedRuns) -> Measure:
    """Training losses at the number of sequences at which the runs are compared."""
    losses = {run.run_id: training_loss(run, named.sequences) for run in named.runs}
    return Measure(
        {run_id: loss for run_id, loss in losses.items() if math.isfinite(loss)},
        {run.run_id: _pair(run) for run in named.runs},
        lambda run: named.sequences * run.context,
    )


def at_the_end(named: NamedRuns) -> Measure:
    """Losses of the last validation, compared after equal tokens only."""
    return Measure(
        {run.run_id: run.final_loss for run in named.runs if math.isfinite(run.final_loss)},
        {
            run.run_id: (*_pair(run), run.validation[-1].tokens)
            for run in named.runs
            if run.validation
        },
        lambda run: run.budget,
    )


def training_loss(run: Run, sequences: int) -> float:
    """Mean training loss over the last tenth of so many sequences.

    NaN if the run has read less, or if no loss there is finite.

    The losses of single updates are noisy. Where no update ends in that tenth, the last one before
    its end counts.
    """
    if run.tokens < sequences * run.context:
        return math.nan
    end = sequences * run.context
    before = [point for point in run.losses if point.tokens <= end]
    tail = [point for point in before if point.tokens > (1 - _TAIL) * end] or before[-1:]
    finite = [point.value for point in tail if math.isfinite(point.value)]
    return fmean(finite) if finite else math.nan


def paired_gaps(named: NamedRuns, measure: Measure) -> dict[str, float]:
    """Each finished run's loss minus that of the reference run with the same pair, by run id.

    Where there are several variants of the reference kind, such as with other learning rates, each
    context has the one with the lowest mean loss.
    """
    finished = [run for run in named.runs if run.is_finished and run.run_id in measure.losses]
    of_variants: dict[int, dict[str, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in finished:
        if run.kind == named.reference:
            of_variants[run.context][named.variant(run)].append(run)
    baselines: dict[tuple[str | int, ...], list[float]] = defaultdict(list)
    for variants in of_variants.values():
        best = min(
            variants.values(), key=lambda runs: fmean(measure.losses[r.run_id] for r in runs)
        )
        for run in best:
            baselines[measure.pairs[run.run_id]].append(measure.losses[run.run_id])
    return {
        run.run_id: measure.losses[run.run_id] - fmean(baselines[measure.pairs[run.run_id]])
        for run in finished
        if measure.pairs[run.run_id] in baselines
    }


def lines(named: NamedRuns, points: Sequence[tuple[Run, float, float]]) -> list[Series]:
    """A point for each run; the means of each finished variant, and the band of their seeds."""
    series = []
    for label in dict.fromkeys(named.label(run) for run, _, _ in points):
        own = [point for point in points if named.label(point[0]) == label]
        run = own[0][0]
        look = named.look(run)
        at = {
            x: by_seed((run, value) for run, where, value in own if where == x)
            for x in sorted({x for _, x, _ in own})
        }
        x, y = [x for _, x, _ in own], [y for _, _, y in own]
        has_mean = run.is_finished and len(own) > 1 and (len(at) > 1 or len(at[x[0]]) > 1)
        series.append(Series(label, look, x, y, run.is_finished, line="", is_seed=has_mean))
        if has_mean:
            found = [interval(list(seeds.values())) for seeds in at.values()]
            band = None
            if any(math.isfinite(one.low) for one in found):
                band = [one.low for one in found], [one.high for one in found]
            series.append(Series(label, look, list(at), [one.mean for one in found], band=band))
    return series


def budgets(runs: Sequence[Run]) -> str:
    """The tokens after which runs were validated last."""
    tokens = sorted({run.validation[-1].tokens for run in runs})
    if len(tokens) == 1:
        return f"After {tokens[0]:,} tokens."
    return f"After different numbers of tokens: {tokens[0]:,} to {tokens[-1]:,}."


def _gap_figure(
    named: NamedRuns, measure: Measure, name: str, title: str, caption: str
) -> Iterator[Figure]:
    gaps = paired_gaps(named, measure)
    runs = [run for run in named.runs if run.run_id in gaps]
    # The baseline is the line at 0; the table has its runs, and other variants of its kind, too.
    others = [run for run in runs if run.kind != named.reference]
    if not others:
        return
    yield Figure(
        name=f"{name}{named.suffix}",
        title=f"{title}{named.where}",
        caption=f"{caption} Differences to {named.reference} runs of the same seed, context and "
        f"data, which read the same text in the same order. {seeds_of(named, others)} {BANDS}",
        caveats=caveats(named, runs, measure.losses, measure.tokens),
        y_label=f"gap to {named.reference} (nats per token)",
        series=lines(named, [(run, run.context, gaps[run.run_id]) for run in others]),
        columns=[*LEADING_COLUMNS, "seed", "loss_nats", "gap_nats"],
        rows=[
            [*named.leading_cells(run), run.seed, measure.losses[run.run_id], gaps[run.run_id]]
            for run in runs
        ],
        reference=(named.reference, 0.0),
        bytes_per_token=named.bytes_per_token,
    )


def by_setting(
    named: NamedRuns, values: Mapping[str, float]
) -> dict[tuple[str, int, int], dict[int, float]]:
    """The values of finished runs by seed, by variant, context and tokens trained on."""
    found: dict[tuple[str, int, int], list[tuple[Run, float]]] = defaultdict(list)
    for run in named.runs:
        if run.is_finished and run.run_id in values:
            found[named.variant(run), run.context, run.budget].append((run, values[run.run_id]))
    return {setting: by_seed(pairs) for setting, pairs in found.items()}


def by_seed(values: Iterable[tuple[Run, float]]) -> dict[int, float]:
    """The mean of each seed, so that a seed run twice counts once."""
    found: dict[int, list[float]] = defaultdict(list)
    for run, value in values:
        found[run.seed].append(value)
    return {seed: fmean(of_seed) for seed, of_seed in found.items()}


def _pair(run: Run) -> tuple[str | int, ...]:
    return run.context, run.seed, run.data.sha256
