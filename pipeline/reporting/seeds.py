"""Statistics over seeds: intervals of means, paired differences, and what they can show.

Seeds are few, so intervals use Student's t. A kind's runs of two seeds differ in their initial
weights and in the order of their text; runs of two kinds with one seed share the order, so their
difference varies less than their losses do.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import NamedTuple

from scipy.special import stdtr, stdtrit

LEVEL = 0.95
"""Of all intervals; a difference is shown if its corrected p is below 1 - LEVEL."""

POWER = 0.8
"""Power of the test at the count that `seeds_needed` gives."""

MARGIN = 0.01
"""Nats per token below which a difference counts as a tie."""

MOST_SEEDS = 1000
"""Seeds beyond which nobody will train: `seeds_needed` stops here."""


class Interval(NamedTuple):
    """A mean of so many independent values, and its interval at LEVEL; NaN bounds for one."""

    number: int
    mean: float
    low: float
    high: float


class Verdict(NamedTuple):
    """What paired differences of one pair say."""

    interval: Interval
    p: float
    """Of no difference, corrected by Holm for all pairs that were tested together; NaN for one."""

    words: str


def interval(values: Sequence[float]) -> Interval:
    """The mean of one or more values, one a seed, and its t-interval."""
    mean, number = fmean(values), len(values)
    if number < 2:
        return Interval(number, mean, math.nan, math.nan)
    half = float(stdtrit(number - 1, (1 + LEVEL) / 2)) * stdev(values) / math.sqrt(number)
    return Interval(number, mean, mean - half, mean + half)


def paired_differences(ours: Mapping[int, float], theirs: Mapping[int, float]) -> list[float]:
    """Ours minus theirs of each seed that both have, by seed."""
    return [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]


def p_value(differences: Sequence[float]) -> float:
    """Two-sided p of a paired t-test that the mean difference is 0; NaN for less than two."""
    if len(differences) < 2:
        return math.nan
    mean, error = fmean(differences), stdev(differences) / math.sqrt(len(differences))
    if error == 0:
        return float(mean == 0)
    return 2 * float(stdtr(len(differences) - 1, -abs(mean) / error))


def holm(ps: Sequence[float]) -> list[float]:
    """p values corrected by Holm's method; NaN stays NaN, and counts as no test."""
    tested = sorted((p, index) for index, p in enumerate(ps) if not math.isnan(p))
    corrected = list(ps)
    least = 0.0
    for rank, (p, index) in enumerate(tested):
        least = max(least, min(1.0, (len(tested) - rank) * p))
        corrected[index] = least
    return corrected


def seeds_needed(differences: Sequence[float]) -> int | None:
    """Seeds with which a paired t-test would show the observed mean, with probability POWER.

    The least n with n >= ((t(1 - a/2) + t(POWER)) s / mean)^2, both quantiles with n - 1 degrees of
    freedom, and s the observed deviation. None for more than MOST_SEEDS.
    """
    mean, deviation = fmean(differences), stdev(differences)
    for n in range(2, MOST_SEEDS + 1):
        quantiles = float(stdtrit(n - 1, (1 + LEVEL) / 2)) + float(stdtrit(n - 1, POWER))
        if n * mean**2 >= (quantiles * deviation) ** 2 and mean:
            return n
    return None


def verdicts(pairs: Sequence[Sequence[float]]) -> list[Verdict]:
    """A verdict for the paired differences of each pair, tested together.

    "shown" if the p corrected by Holm is below 1 - LEVEL; "tie" if the interval lies within
    MARGIN of 0; otherwise how many seeds it would take.
    """
    corrected = holm([p_value(differences) for differences in pairs])
    return list(map(_verdict, pairs, corrected))


def _verdict(differences: Sequence[float], p: float) -> Verdict:
    found = interval(differences)
    if found.number < 2:
        return Verdict(found, p, "one seed: wanted two or more")
    if p < 1 - LEVEL:
        words = f"shown by {found.number} seeds: {'lower' if found.mean < 0 else 'higher'}"
    elif found.low >= -MARGIN and found.high <= MARGIN:
        words = f"tie: less than {MARGIN:g} apart"
    elif (needed := seeds_needed(differences)) is None:
        words = f"needs more than {MOST_SEEDS:,} seeds"
    else:
        # At the level of a single test. Correcting for many can take one that passes it.
        words = f"needs about {max(needed, found.number + 1)} seeds"
    return Verdict(found, p, words)
