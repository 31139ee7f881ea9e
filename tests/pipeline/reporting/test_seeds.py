"""Statistics over seeds against scipy's tests and against formulas written here."""

import math
from statistics import fmean, stdev

import numpy as np
import pytest
from scipy import stats

from longhaul.pipeline.reporting.seeds import (
    MOST_SEEDS,
    holm,
    interval,
    p_value,
    paired_differences,
    seeds_needed,
    verdicts,
)

VALUES = (0.03, 0.05, 0.01, 0.08)


def test_an_interval_is_students() -> None:
    found = interval(VALUES)
    wanted = stats.t.interval(0.95, 3, loc=fmean(VALUES), scale=stats.sem(VALUES))
    assert (found.low, found.high) == pytest.approx(wanted, rel=1e-12)
    assert found.number == 4
    # The quantile of two seeds is 12.7: two seeds say next to nothing.
    assert interval((0.0, 2.0)).high == pytest.approx(1 + 12.706204736, rel=1e-9)
    assert math.isnan(interval((1.0,)).low)


def test_p_values_are_those_of_a_paired_test() -> None:
    ours, theirs = [3.0, 4.5, 5.25, 4.0], [2.9, 4.3, 5.3, 3.8]
    differences = paired_differences(dict(enumerate(ours)), dict(enumerate(theirs)))
    wanted = stats.ttest_rel(ours, theirs).pvalue
    assert p_value(differences) == pytest.approx(wanted, rel=1e-9)
    assert p_value((0.0, 0.0)) == 1.0
    assert p_value((1.0, 1.0)) == 0.0
    assert math.isnan(p_value((1.0,)))


def test_only_seeds_of_both_are_paired() -> None:
    assert paired_differences({0: 3.0, 1: 4.0, 2: 9.0}, {2: 8.0, 0: 1.0, 5: 0.0}) == [2.0, 1.0]


def test_holm_multiplies_by_the_tests_that_are_left() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    corrected = holm([0.01, math.nan, 0.02])
    assert corrected[0] == pytest.approx(0.02)
    assert math.isnan(corrected[1])
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_so_many_seeds_show_the_difference_with_the_stated_power() -> None:
    differences = (0.0, 0.02, 0.04)
    n = seeds_needed(differences)
    assert n is not None
    generator = np.random.default_rng(0)
    drawn = generator.normal(fmean(differences), stdev(differences), (20_000, n))
    shown = stats.ttest_1samp(drawn, 0, axis=1).pvalue < 0.05
    assert 0.75 < shown.mean() < 0.88
    assert seeds_needed((-1.0, 1.0)) is None


@pytest.mark.parametrize(
    ("differences", "words"),
    [
        ((0.10, 0.11, 0.12), "shown by 3 seeds: higher"),
        ((-0.10, -0.11, -0.12), "shown by 3 seeds: lower"),
        ((0.001, -0.001, 0.0), "tie: less than 0.01 apart"),
        ((0.0, 0.0), "tie: less than 0.01 apart"),
        ((0.3,), "one seed: wanted two or more"),
        ((-1.0, 1.0), f"needs more than {MOST_SEEDS:,} seeds"),
        ((0.0, 0.02, 0.04), "needs about 10 seeds"),
    ],
)
def test_a_verdict_says_what_seeds_can_show(differences: tuple[float, ...], words: str) -> None:
    (found,) = verdicts([differences])
    assert found.words == words


def test_pairs_that_are_tested_together_are_corrected() -> None:
    clear = (0.02, 0.045, 0.055, 0.06)
    alone, *_ = verdicts([clear])
    together, *_ = verdicts([clear, *[(0.3, -0.2, 0.1)] * 9])
    assert alone.words.startswith("shown")
    assert together.words.startswith("needs about")
