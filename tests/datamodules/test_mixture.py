"""Several sources in shares: exact at every prefix, at any number of ranks, across changes."""

import numpy as np
import pytest
from everyday import everyday

from longhaul.datamodules.mixture import MixtureOrder, Stage, integer_weights
from longhaul.datamodules.order import SampleOrder

MIXTURES = {
    2: [0.7, 0.3],
    3: [0.6, 0.3, 0.1],
    7: [0.45, 0.25, 0.12, 0.08, 0.06, 0.03, 0.01],
    64: [1 / n for n in range(1, 65)],
}
UPDATE = 250


def order_of(
    weights: list[float], *later: tuple[int, list[float]], update: int = UPDATE, seed: int = 5
) -> MixtureOrder:
    """Sources s0, s1, ... of 100 blocks of 4 samples, with weights that may change at samples."""
    names = [f"s{number}" for number in range(len(weights))]
    stages = [
        Stage(sample, integer_weights(dict(zip(names, some, strict=True))))
        for sample, some in [(0, weights), *later]
    ]
    orders = {name: SampleOrder([60, 40], 4, f"{seed}/{name}", 1) for name in names}
    return MixtureOrder(orders, stages, context=1, samples_per_update=update, seed=seed)


def deviation(source: np.ndarray, shares: np.ndarray) -> float:
    """The largest |count - n w| of a source, over all prefixes n.

    Between two draws of a source its deviation only grows, so the ends of each gap are enough.
    """
    worst = 0.0
    order = np.argsort(source, kind="stable")
    for share, drawn in zip(
        shares, np.split(order, np.cumsum(np.bincount(source))[:-1]), strict=True
    ):
        count = np.arange(drawn.size)
        after = np.append(drawn[1:], source.size)
        for found in (count + 1 - (drawn + 1) * share, count + 1 - after * share):
            worst = max(worst, float(np.abs(found).max()))
        worst = max(worst, drawn[0] * share)
    return worst


@pytest.mark.parametrize("count", everyday(MIXTURES, [3]))
def test_every_prefix_of_a_million_samples_has_its_shares(count: int) -> None:
    weights = MIXTURES[count]
    integers = np.array(list(integer_weights({str(i): w for i, w in enumerate(weights)}).values()))
    shares = integers / integers.sum()
    assert np.abs(shares - np.array(weights) / sum(weights)).max() < 1e-6
    order = order_of(weights)
    samples = np.arange(1_000_000)
    source, index = order.sources_of(samples)
    # At every update's end, and, before the draws of an update are permuted, at every prefix. The
    # bound is 2 for any weights; with these it is less than 1, and more with another tree or
    # without rounding.
    update = samples // UPDATE
    each = np.bincount(update * count + source).reshape(-1, count)  # (updates, sources)
    ends = UPDATE * np.arange(1, len(each) + 1)[:, None]
    assert np.abs(each.cumsum(axis=0) - ends * shares).max() < 1
    unpermuted, numbers = order_of(weights, update=1).sources_of(samples)
    assert deviation(unpermuted, shares) < 1
    # Each source's own indices count on: nothing is lost, nothing comes twice.
    starts = np.cumsum(np.bincount(source)) - np.bincount(source)
    drawn = numbers[np.argsort(unpermuted, kind="stable")]
    assert np.array_equal(drawn + np.repeat(starts, np.bincount(unpermuted)), samples)
    assert np.array_equal(np.sort(index + starts[source]), samples)
    for end in (0, UPDATE, 400 * UPDATE, 4000 * UPDATE):
        wanted = np.bincount(source[:end], minlength=count)
        assert np.array_equal(order.counts(end), wanted)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_no_rank_reads_one_source_alone(ranks: int) -> None:
    """Two equal sources would alternate, and each of two ranks read one of them."""
    source, _ = order_of([0.5, 0.5], update=42).sources_of(np.arange(42 * 100))
    for rank in range(ranks):
        own = source[rank::ranks]
        assert 0.4 < own.mean() < 0.6


def test_weights_change_at_the_next_update_and_nothing_is_lost_there() -> None:
    order = order_of([0.7, 0.3], (900, [0.2, 0.8]), (2000, [0, 1]))
    source, index = order.sources_of(np.arange(3000))
    assert np.bincount(source[:1000]).tolist() == [700, 300]  # 900 is within an update of 250
    assert np.bincount(source[1000:2000]).tolist() == [200, 800]
    assert (source[2000:] == 1).all()
    for number in (0, 1):
        own = np.sort(index[source == number])
        assert np.array_equal(own, np.arange(own.size))
    assert order.counts(3000).tolist() == [900, 2100]


def test_a_source_is_read_in_an_order_of_its_name_and_seed_alone() -> None:
    def first_of(names: list[str], wanted: str, seed: int) -> list[tuple[int, ...]]:
        orders = {name: SampleOrder([60, 40], 4, f"{seed}/{name}", 1) for name in names}
        stages = [Stage(0, dict.fromkeys(names, 1))]
        mixture = MixtureOrder(orders, stages, context=1, samples_per_update=60, seed=seed)
        found = mixture.locate_many(np.arange(300))
        own = found.source == names.index(wanted)
        _, index = mixture.sources_of(np.arange(300))
        places = zip(*(one[own].tolist() for one in found[1:]), strict=True)
        by_index = sorted(zip(index[own].tolist(), places, strict=True))
        return [place for _, place in by_index][:90]

    alone = first_of(["web", "code"], "web", 1)
    assert alone == first_of(["math", "code", "web"], "web", 1)
    assert alone != first_of(["web", "code"], "code", 1)
    assert alone != first_of(["web", "code"], "web", 2)


def test_the_order_never_changes_between_versions() -> None:
    # Recorded once. If these numbers change, no existing run of several sources can resume.
    order = order_of([0.6, 0.3, 0.1], (500, [0.1, 0.1, 0.8]))
    found = order.locate_many(np.array([0, 1, 2, 499, 500, 10**9]))
    assert list(zip(*(part.tolist() for part in found), strict=True)) == [
        (0, 0, 0, 49, 3),
        (0, 0, 0, 56, 0),
        (0, 0, 0, 3, 1),
        (0, 0, 1, 38, 1),
        (2, 0, 0, 2, 1),
        (2, 1999999, 0, 55, 3),
    ]


@pytest.mark.parametrize(
    ("weights", "wanted"),
    [
        ({"a": 0.7, "b": 0.3}, {"a": 700_000, "b": 300_000}),
        ({"a": 7, "b": 3.0}, {"a": 7, "b": 3}),
        ({"a": 0.1, "b": 0.1, "c": 0.1}, {"a": 333_334, "b": 333_333, "c": 333_333}),
        ({"a": 0.0, "b": 2e9, "c": 1}, {"b": 999_999, "c": 1}),
        ({"a": 1e9, "b": 1, "c": 1.0}, {"a": 999_998, "b": 1, "c": 1}),
    ],
)
def test_weights_become_integers_by_largest_remainders(
    weights: dict[str, float], wanted: dict[str, int]
) -> None:
    assert integer_weights(weights) == wanted
