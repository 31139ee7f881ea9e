"""Statistics over seeds: intervals of means, paired differences, and what they can show.

Seeds are few, so intervals use Student's t. A kind's runs of two seeds differ in their initial
weights and in the order of their text; runs of two kinds with one seed share the order, so their
difference varies less than their losses do.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from scipy.special import stdtr, stdtrit

LEVEL = 0.95
"""Of all intervals; a difference is shown if its corrected p is below 1 - LEVEL."""

POWER = 0.8
"""Power of the test at the count that `seeds_needed` gives."""

MARGIN = 0.01
"""Nats per token below which a difference counts as a tie."""

MOST_SEEDS = 1000
"""Seeds beyond which nobody will train: `seeds_needed` stops here."""


@dataclass(frozen=True)
class Interval:
    """A mean of independent values, and its interval at LEVEL; NaN bounds for one value."""

    mean: float
    low: float
    high: float
    count: int


@dataclass(frozen=True)
class Verdict:
    """What paired differences of one pair say."""

    interval: Interval
    p: float
    """Of no difference, corrected by Holm for all pairs that were tested together; NaN for one."""

    words: str


def interval(values: Sequence[float]) -> Interval:
    """The mean of one or more values, one a seed, and its t-interval."""
    mean, count = fmean(values), len(values)
    if count < 2:
        return Interval(mean, math.nan, math.nan, count)
    half = float(stdtrit(count - 1, (1 + LEVEL) / 2)) * stdev(values) / math.sqrt(count)
    return Interval(mean, mean - half, mean + half, count)


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


def seeds_needed(differences: Sequence[float], level: float = LEVEL) -> int | None:
    """Seeds with which a paired t-test would show the observed mean, with probability POWER.

    The least n with n >= ((t(1 - a/2) + t(POWER)) s / mean)^2, both quantiles with n - 1 degrees of
    freedom, and s the observed deviation. None for more than MOST_SEEDS.
    """
    mean, deviation = fmean(differences), stdev(differences)
    for n in range(2, MOST_SEEDS + 1):
        quantiles = float(stdtrit(n - 1, (1 + level) / 2)) + float(stdtrit(n - 1, POWER))
        if n * mean**2 >= (quantiles * deviation) ** 2 and mean:
            return n
    return None


def verdicts(pairs: Sequence[Sequence[float]], margin: float = MARGIN) -> list[Verdict]:
    """A verdict for the paired differences of each pair, tested together.

    "shown" if the p corrected by Holm is below 1 - LEVEL; "tie" if the interval lies within the
    margin; otherwise how many seeds it would take.
    """
    corrected = holm([p_value(differences) for differences in pairs])
    return [_verdict(*one, margin) for one in zip(pairs, corrected, strict=True)]


def _verdict(differences: Sequence[float], p: float, margin: float) -> Verdict:
    found = interval(differences)
    if found.count < 2:
        return Verdict(found, p, "one seed: wanted two or more")
    if p < 1 - LEVEL:
        words = f"shown by {found.count} seeds: {'lower' if found.mean < 0 else 'higher'}"
    elif -margin <= found.low and found.high <= margin:
        words = f"tie: less than {margin:g} apart"
    else:
        # At the level of a single test. Correcting for many can take one that passes it.
        needed = seeds_needed(differences)
        if needed is None:
            words = f"needs more than {MOST_SEEDS:,} seeds"
        else:
            words = f"needs about {max(needed, found.count + 1)} seeds"
    return Verdict(found, p, words)
