"""A verdict for each pair of variants: shown, tie, or how many seeds it would take."""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from longhaul.pipeline.reporting.caveats import caveats, extrapolation
from longhaul.pipeline.reporting.comparison import at_the_end, by_seed, by_setting
from longhaul.pipeline.reporting.drawing import Table
from longhaul.pipeline.reporting.groups import groups
from longhaul.pipeline.reporting.runs import Run
from longhaul.pipeline.reporting.seeds import LEVEL, MARGIN, POWER, paired_differences, verdicts
from longhaul.pipeline.reporting.variants import NamedRuns

_MOST_VARIANTS = 6
"""Variants of which all pairs are compared; of more, only those with the reference kind."""

_COLUMNS = (
    *("variant", "compared with", "loss", "verdict", "training context", "tokens", "seeds"),
    *("difference (nats per token)", "low", "high", "p"),
)


class _Pair(NamedTuple):
    """Two variants, what of them is compared, and their differences by seed."""

    names: tuple[str, str]
    context: int
    tokens: int
    loss: str
    window: int
    """That the loss is of; 0 means the last validation."""

    differences: list[float]


def verdict_tables(named: NamedRuns) -> Iterator[Table]:
    """Paired differences of the last validation, and of the longest windows of the task context."""
    pairs = [*_of_validation(named), *_of_windows(named)]
    if not pairs:
        return
    beyond = {pair.context: pair.window for pair in pairs if pair.window > pair.context}
    found = verdicts([pair.differences for pair in pairs])
    tested = sum(len(pair.differences) > 1 for pair in pairs)
    yield Table(
        name=f"verdicts{named.suffix}",
        title=f"What the seeds show{named.where}",
        caption="Differences of runs with the same seed, context, data and tokens; below 0 the "
        f"first variant is better. Low and high: t-interval of {LEVEL:.0%}. p: of a paired t-test, "
        f"corrected by Holm for the {tested} rows with two seeds or more. Shown: p below "
        f"{1 - LEVEL:.2f}; tie: the interval lies within {MARGIN:g} nats of 0; otherwise the seeds "
        f"with which a difference as large as this one, and as noisy, would be shown with a "
        f"probability of {POWER:.0%}, tested alone",
        caveats=[
            *caveats(named, named.runs, _worst_losses(named, pairs), lambda run: run.budget),
            *(one for pair in sorted(beyond.items()) for one in extrapolation(*pair)),
        ],
        columns=_COLUMNS,
        rows=[
            [*pair.names, pair.loss, words, pair.context, pair.tokens, *interval, p]
            for pair, (interval, p, words) in zip(pairs, found, strict=True)
        ],
    )


def _worst_losses(named: NamedRuns, pairs: Sequence[_Pair]) -> dict[str, float]:
    """The worst loss of each run that the verdicts are of, by run id."""
    losses = dict(at_the_end(named).losses)
    settings = {(pair.context, pair.window) for pair in pairs}
    for group in groups(named, "context"):
        for run, evaluated in group.members:
            for row in evaluated.rows:
                is_compared = not group.text and not evaluated.label.scaling
                if is_compared and (run.context, row["context"]) in settings:
                    losses[run.run_id] = max(losses.get(run.run_id, 0.0), row["loss_nats"])
    return losses


def _of_validation(named: NamedRuns) -> Iterator[_Pair]:
    losses = by_setting(named, at_the_end(named).losses)
    for context, tokens in sorted({(c, t) for _, c, t in losses}):
        own = {n: seeds for (n, c, t), seeds in losses.items() if (c, t) == (context, tokens)}
        for names in _compared(named, own):
            differences = paired_differences(*(own[name] for name in names))
            if differences:
                yield _Pair(names, context, tokens, "validation", 0, differences)


def _of_windows(named: NamedRuns) -> Iterator[_Pair]:
    for group in groups(named, "context"):
        if group.text:
            continue
        found: dict[str, dict[int, list[tuple[Run, float]]]] = defaultdict(
            lambda: defaultdict(list)
        )
        for run, evaluated in group.members:
            if run.is_finished and not evaluated.label.scaling:
                for row in evaluated.rows:
                    found[named.variant(run)][row["context"]].append((run, row["loss_nats"]))
        losses = {
            name: {window: by_seed(values) for window, values in own.items()}
            for name, own in found.items()
        }
        for ours, theirs in _compared(named, losses):
            # The longest windows of as many seeds as possible: one run that was evaluated at longer
            # windows than all others is not a pair's only seed.
            differences, longest = max(
                (
                    (paired_differences(losses[ours][window], losses[theirs][window]), window)
                    for window in losses[ours].keys() & losses[theirs].keys()
                ),
                key=lambda one: (len(one[0]), one[1]),
                default=([], 0),
            )
            if differences:
                tokens = group.members[0].tokens
                loss = f"in windows of {longest:,}"
                yield _Pair((ours, theirs), group.context, tokens, loss, longest, differences)


def _compared(named: NamedRuns, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """The pairs of variants that are compared; the reference kind stands second."""
    of_reference = {named.variant(run) for run in named.runs if run.kind == named.reference}
    ordered = sorted(names, key=lambda name: (name in of_reference, name))
    for ours, theirs in itertools.combinations(ordered, 2):
        if len(ordered) <= _MOST_VARIANTS or theirs in of_reference:
            yield ours, theirs
