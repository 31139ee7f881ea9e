"""Where the numbers of tensors are, put together from the headers of all ranks' files."""

import itertools
import random

import pytest
import torch
from torch import Tensor

from longhaul.pipeline.checkpoints.shards import Shard, Shards, merge


def cut(size: tuple[int, ...], chance: random.Random) -> list[list[tuple[int, int]]]:
    """Each block of a grid of random lines through a tensor, as its ranges."""
    edges = [sorted({0, n, *chance.choices(range(n + 1), k=2)}) for n in size]
    return [list(block) for block in itertools.product(*map(itertools.pairwise, edges))]


def stored(whole: Tensor, chance: random.Random) -> tuple[Shards, dict[int, Tensor]]:
    """A tensor in shards, one a file, in any order."""
    blocks = cut(tuple(whole.shape), chance)
    chance.shuffle(blocks)
    found, values = [], {}
    for file, ranges in enumerate(blocks):
        values[file] = whole[tuple(itertools.starmap(slice, ranges))]
        offset = tuple(begin for begin, _ in ranges)
        found.append({"model/a": Shard(file, "I64", offset, tuple(values[file].shape))})
    return merge(found)["model/a"], values


@pytest.mark.parametrize("size", [(), (7,), (5, 4), (6, 1, 3)])
def test_any_block_is_put_together_from_shards_of_any_shape(size: tuple[int, ...]) -> None:
    chance = random.Random(len(size))
    whole = torch.arange(1, torch.Size(size).numel() + 1).reshape(size)
    for _ in range(20):
        shards, values = stored(whole, chance)
        assert (shards.dtype, shards.size) == (torch.int64, whole.shape)
        for ranges in cut(size, chance):
            wanted = whole[tuple(itertools.starmap(slice, ranges))]
            found = torch.zeros_like(wanted)
            for file, in_shard, in_block in shards.within([a for a, _ in ranges], wanted.shape):
                assert values[file][in_shard].numel(), "a file that has nothing of the block"
                found[in_block] = values[file][in_shard]
            torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_a_rank_that_has_nothing_of_a_tensor_reads_and_adds_nothing() -> None:
    ranks = [Shard(0, "F32", (0,), (2,)), Shard(1, "F32", (2,), (1,)), Shard(2, "F32", (3,), (0,))]
    shards = merge({"model/a": shard} for shard in ranks)["model/a"]
    assert shards.size == (3,)
    assert [file for file, *_ in shards.within((0,), (3,))] == [0, 1]
    assert list(shards.within((3,), (0,))) == []


def test_an_empty_tensor_is_in_no_file() -> None:
    shards = merge([{"model/a": Shard(0, "F32", (0, 0), (0, 4))}])["model/a"]
    assert shards.size == (0, 4)
    assert list(shards.within((0, 0), (0, 4))) == []


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (Shard(1, "BF16", (2, 0), (2, 3)), "shards of different types or numbers of dimensions"),
        (Shard(1, "F32", (2,), (2,)), "shards of different types or numbers of dimensions"),
        (Shard(1, "F32", (3, 0), (1, 3)), "found 9 numbers for 'model/a', wanted 12"),
        (Shard(1, "F32", (1, 0), (2, 3)), "found 12 numbers for 'model/a', wanted 9"),
    ],
)
def test_shards_that_do_not_fit_are_refused(second: Shard, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        merge([{"model/a": Shard(0, "F32", (0, 0), (2, 3))}, {"model/a": second}])
