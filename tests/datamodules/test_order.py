import itertools

import numpy as np
import pytest

from longhaul.datamodules.corpus import Corpus
from longhaul.datamodules.manifest import Manifest, ShardEntry
from longhaul.datamodules.order import SampleOrder, permute


def corpus_of(*blocks: int, block_tokens: int = 64) -> Corpus:
    return Corpus(
        Manifest(
            tokenizer="bytes",
            tokenizer_sha256="",
            vocab_size=257,
            bos_id=256,
            eot_id=256,
            document_tokens=block_tokens,
            dtype="uint16",
            shards=tuple(
                ShardEntry(name=f"train-{i}.tar", bytes=1, documents=count, sha256="")
                for i, count in enumerate(blocks)
            ),
        )
    )


def samples_of(order: SampleOrder, first: int, last: int) -> list[tuple[int, int, int, int]]:
    found = order.locate_many(np.arange(first, last))
    return list(
        zip(
            found.epoch.tolist(),
            found.shard.tolist(),
            found.block.tolist(),
            found.window.tolist(),
            strict=True,
        )
    )


@pytest.mark.parametrize("shuffle_shards", [1, 2, 3, 100])
@pytest.mark.parametrize("blocks", [(1,), (5, 3), (4, 4, 4, 1, 7)])
def test_an_epoch_contains_every_window_once(blocks: tuple[int, ...], shuffle_shards: int) -> None:
    order = corpus_of(*blocks).training_order(16, seed=3, shuffle_shards=shuffle_shards)
    size = order.samples_per_epoch
    assert size == sum(blocks) * 4
    every = {(s, d, w) for s, count in enumerate(blocks) for d in range(count) for w in range(4)}
    for epoch in range(3):
        samples = samples_of(order, epoch * size, (epoch + 1) * size)
        assert {sample[0] for sample in samples} == {epoch}
        assert sorted(sample[1:] for sample in samples) == sorted(every)


def test_epochs_and_seeds_have_different_orders() -> None:
    corpus = corpus_of(8, 8, 8, 8)
    order = corpus.training_order(16, seed=0, shuffle_shards=2)
    other = corpus.training_order(16, seed=1, shuffle_shards=2)
    size = order.samples_per_epoch
    orders = [
        [sample[1:] for sample in samples_of(order, 0, size)],
        [sample[1:] for sample in samples_of(order, size, 2 * size)],
        [sample[1:] for sample in samples_of(other, 0, size)],
    ]
    for i in range(3):
        for j in range(i):
            agreeing = sum(a == b for a, b in zip(orders[i], orders[j], strict=True))
            assert agreeing < size / 8


def test_a_group_mixes_its_own_shards_and_no_others() -> None:
    order = corpus_of(*[4] * 9).training_order(16, seed=0, shuffle_shards=3)
    groups = [
        [sample[1] for sample in samples_of(order, start, start + 48)] for start in (0, 48, 96)
    ]
    assert [len(set(group)) for group in groups] == [3, 3, 3]
    assert set().union(*groups) == set(range(9))
    # Within a group, consecutive samples mostly come from different shards.
    for group in groups:
        assert sum(a != b for a, b in itertools.pairwise(group)) > 20


def test_a_far_index_is_located_without_earlier_ones() -> None:
    corpus = corpus_of(*[256] * 3000, block_tokens=65_536)
    index = 10**9
    order = corpus.training_order(8192, seed=0, shuffle_shards=8)
    near = samples_of(order, index - 3, index + 3)
    fresh = corpus.training_order(8192, seed=0, shuffle_shards=8)
    assert samples_of(fresh, index, index + 1) == near[3:4]
    assert near[3][0] == index // order.samples_per_epoch == 162


def test_the_order_never_changes_between_versions() -> None:
    # Recorded once. If these numbers change, no existing run can resume correctly.
    order = corpus_of(5, 3, 7).training_order(16, seed=42, shuffle_shards=2)
    assert [samples_of(order, index, index + 1)[0] for index in (0, 1, 2, 59, 60, 10**9)] == [
        (0, 1, 1, 0),
        (0, 2, 2, 1),
        (0, 1, 1, 2),
        (0, 0, 0, 1),
        (1, 2, 1, 0),
        (16666666, 2, 2, 3),
    ]


def test_validation_reads_windows_in_stored_order() -> None:
    order = corpus_of(1, 2).stored_order(32)
    found = order.locate_many(np.arange(6))
    assert found.shard.tolist() == [0, 0, 1, 1, 1, 1]
    assert found.block.tolist() == [0, 0, 0, 0, 1, 1]
    assert found.window.tolist() == [0, 1, 0, 1, 0, 1]


def test_a_context_that_does_not_divide_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match=r"data.context: 24 .* 64 tokens .* is 16"):
        corpus_of(1).training_order(24, seed=0, shuffle_shards=1)
    with pytest.raises(ValueError, match=r"data.context: 128 .* is 64"):
        corpus_of(1).training_order(128, seed=0, shuffle_shards=1)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 17, 64, 65, 1000])
def test_permute_is_a_permutation(size: int) -> None:
    keys = np.array([11, 22, 33, 44, 55, 66], np.uint64)
    assert sorted(permute(np.arange(size), size, keys).tolist()) == list(range(size))


def test_permute_is_uncorrelated_with_its_input() -> None:
    size, rounds = 2000, 50
    generator = np.random.default_rng(0)
    places = np.arange(size)
    correlations = []
    for _ in range(rounds):
        keys = generator.integers(0, 2**63, 6).astype(np.uint64)
        image = permute(places, size, keys)
        correlations.append(np.corrcoef(places, image)[0, 1])
        # Neighbours get random distances; a random permutation has about 1,150 different ones.
        assert np.unique(np.diff(image)).size > 1000
    # For random permutations, correlations are normal with standard deviation 1 / sqrt(size).
    assert abs(np.mean(correlations)) < 4 / np.sqrt(size * rounds)
    assert 0.7 < np.std(correlations) * np.sqrt(size) < 1.4
