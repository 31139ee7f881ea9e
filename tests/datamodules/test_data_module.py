import errno
import itertools
import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from everyday import everyday

from longhaul.datamodules.config import DataConfig
from longhaul.datamodules.corpus import Corpus
from longhaul.datamodules.data_module import TokenDataModule
from longhaul.datamodules.order import SampleLocations, SampleOrder, StoredOrder
from longhaul.datamodules.preparation.packing import Packing
from longhaul.datamodules.preparation.source_files import open_sources
from longhaul.datamodules.preparation.text import prepare_text
from longhaul.datamodules.shards import ShardError, UnreadShardError
from longhaul.datamodules.store import ShardStore
from longhaul.datamodules.stream import TokenWindows, ValidationBatches
from longhaul.datamodules.tokenizer import build_tokenizer

CONTEXT = 16
UPDATE = 24


def module_of(location: str, *, rank: int = 0, world_size: int = 1, **options) -> TokenDataModule:
    config = {
        name: options.pop(name) for name in list(options) if name in DataConfig.__dataclass_fields__
    }
    config = {"workers": 0, "shuffle_shards": 2, **config}
    options = {"seed": 5, "samples_per_update": UPDATE, "micro_batch": 2, **options}
    return TokenDataModule(
        DataConfig(manifest=location, context=CONTEXT, **config),
        rank=rank,
        world_size=world_size,
        **options,
    )


# Of ranks and workers; `make test-all` has the other pairs.
EVERYDAY = ((1, 1), (2, 3), (3, 0), (4, 0))


@pytest.mark.parametrize(
    ("world_size", "workers"),
    everyday(itertools.product((1, 2, 3, 4), (0, 1, 3)), EVERYDAY),
)
def test_updates_are_the_same_for_any_number_of_ranks_and_workers(
    make_shards, world_size: int, workers: int
) -> None:
    manifest = make_shards(blocks=10)
    micro_batch = {1: 1, 2: 3, 3: 2, 4: 1}[world_size]
    order = Corpus(manifest).training_order(CONTEXT, 5, 2)
    stride = micro_batch * world_size
    for rank in range(world_size):
        module = module_of(
            manifest.location,
            rank=rank,
            world_size=world_size,
            workers=workers,
            micro_batch=micro_batch,
            num_samples=72,  # past the end of the first epoch, which has 40
        )
        batches = list(module.train_dataloader())
        # The samples of a micro-step are assigned in order of rank. In these shards, tokens count
        # on from block to block, with 64 tokens per block and 3 blocks per shard.
        assert [batch["index"].tolist() for batch in batches] == [
            list(range(start, start + micro_batch))
            for start in range(rank * micro_batch, 72, stride)
        ]
        for batch in batches:
            for index, target in zip(batch["index"].tolist(), batch["target"], strict=True):
                at = order.locate_many(np.array([index]))
                (first,) = (at.shard * 3 + at.block) * 64 + at.window * CONTEXT
                assert target.tolist() == list(range(first, first + CONTEXT))


@pytest.mark.parametrize("is_validation", [False, True])
def test_a_worker_locates_its_own_samples_alone(
    make_shards, monkeypatch: pytest.MonkeyPatch, is_validation: bool
) -> None:
    """The second of three workers of the second of four ranks."""
    manifest = make_shards(blocks=150, docs_per_shard=50)
    store = ShardStore(
        manifest, cache_dir=None, replaces_bad=False, max_bad_fraction=0, keep_open=4
    )
    corpus = Corpus(manifest)
    order = corpus.stored_order(16) if is_validation else corpus.training_order(16, 5, 2)
    stride = 4 * 3 * 2
    if is_validation:  # 600 samples, of which the last batch lacks some
        sampler = ValidationBatches(num_samples=600, micro_batch=2, rank=1, world_size=4)
        batches = [list(batch) for batch in sampler][1::3]
    else:
        batches = [[start, start + 1] for start in range(10, 6000, stride)]
    located: list[int] = []
    real = type(order).locate_many

    def spy(self: SampleOrder | StoredOrder, indices: np.ndarray) -> SampleLocations:
        located.extend(indices.tolist())
        return real(self, indices)

    monkeypatch.setattr(type(order), "locate_many", spy)
    own = TokenWindows([store], order, CONTEXT, stride)
    monkeypatch.setattr("longhaul.datamodules.stream._MOST_LOCATED", 100)
    found = [own.__getitems__(batch).tokens for batch in batches]
    wanted = {max(index, 0) for batch in batches for index in batch}
    assert wanted <= set(located)
    assert len(located) <= len(wanted) + 200
    for batch, tokens in zip(batches, found, strict=True):
        fresh = TokenWindows([store], order, CONTEXT, 1).__getitems__(batch)
        assert np.array_equal(tokens, fresh.tokens)


@pytest.mark.parametrize("workers", [0, 1])
def test_documents_begin_where_the_shards_say_with_the_bos_id_in_front(
    tmp_path: Path, workers: int
) -> None:
    lengths = [1, 2, 3, 9, 16, 1, 40, 7, 60, 5, 30]
    texts = [chr(97 + n) * length for n, length in enumerate(lengths)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "texts.jsonl").write_text(lines)
    sources, bos = open_sources([str(tmp_path / "texts.jsonl")]), 256
    tokenizer = build_tokenizer("bytes")
    (manifest,) = prepare_text(
        sources, tmp_path / "out", tokenizer, packing=Packing(32), docs_per_shard=2
    )
    module = module_of(manifest.location, num_samples=24, workers=workers)
    for batch in module.train_dataloader():
        for tokens, target, is_first in zip(
            batch["input"], batch["target"], batch["is_first"], strict=True
        ):
            ended = [place > 0 and target[place - 1] == bos for place in range(CONTEXT)]
            assert is_first.tolist() == [place == 0 or ended[place] for place in range(CONTEXT)]
            before = target.roll(1).masked_fill(is_first, bos)
            assert torch.equal(tokens, before)
    plain = module_of(manifest.location, num_samples=24, workers=workers, document_mask=False)
    assert all("is_first" not in batch for batch in plain.train_dataloader())


def test_micro_steps_assign_samples_in_order_of_rank(make_shards) -> None:
    location = make_shards().location
    for rank in (0, 1):
        module = module_of(location, rank=rank, world_size=2, micro_batch=4, num_samples=24)
        starts = [batch["index"].tolist() for batch in module.train_dataloader()]
        assert starts == [list(range(s, s + 4)) for s in range(4 * rank, 24, 8)]


def test_a_batch_holds_the_windows_in_order_with_bos_in_front(make_shards) -> None:
    manifest = make_shards(blocks=10, docs_per_shard=3)
    module = module_of(manifest.location, num_samples=48)
    order = Corpus(manifest).training_order(CONTEXT, 5, 2)
    for batch in module.train_dataloader():
        assert {name: t.dtype for name, t in batch.items()} == dict.fromkeys(batch, torch.int64)
        for row, index in enumerate(batch["index"].tolist()):
            at = order.locate_many(np.array([index]))
            (first,) = (at.shard * 3 + at.block) * 64 + at.window * CONTEXT
            assert batch["target"][row].tolist() == list(range(first, first + CONTEXT))
            assert batch["input"][row, 0] == manifest.bos_id
            assert batch["input"][row, 1:].equal(batch["target"][row, :-1])


@pytest.mark.parametrize("workers", [0, 2])
def test_starting_later_gives_the_same_samples(make_shards, workers: int) -> None:
    location = make_shards().location
    whole = list(module_of(location, num_samples=96).train_dataloader())
    module = module_of(location, first_sample=48, num_samples=48, workers=workers)
    for found, expected in zip(module.train_dataloader(), whole[24:], strict=True):
        for name, tensor in expected.items():
            assert found[name].equal(tensor)


def test_the_stream_is_endless_without_num_samples(make_shards) -> None:
    loader = module_of(make_shards(blocks=2).location).train_dataloader()
    with pytest.raises(TypeError):
        len(loader)
    for expected, batch in zip(range(50), loader, strict=False):
        assert batch["index"].tolist() == [2 * expected, 2 * expected + 1]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_validation_is_divided_among_ranks_and_padded(make_shards, world_size: int) -> None:
    train = make_shards()
    indices, lengths = [], set()
    for rank in range(world_size):
        module = module_of(
            train.location,
            rank=rank,
            world_size=world_size,
            validation_manifest=train.location,
            validation_tokens=7 * CONTEXT,
        )
        batches = list(module.val_dataloader())
        lengths.add(len(batches))
        for batch in batches:
            assert batch["target"].shape == (2, CONTEXT)
            for index, target in zip(batch["index"].tolist(), batch["target"], strict=True):
                assert target[0] == max(index, 0) * CONTEXT
                indices.append(index)
    assert len(lengths) == 1
    assert sorted(i for i in indices if i >= 0) == list(range(7))
    assert len(indices) == lengths.pop() * 2 * world_size


def test_validation_is_limited_to_the_samples_that_exist(make_shards) -> None:
    small = make_shards(blocks=1).location
    module = module_of(small, validation_manifest=small, validation_tokens=64 * CONTEXT)
    assert [b["index"].tolist() for b in module.val_dataloader()] == [[0, 1], [2, 3]]
    assert module_of(small).val_dataloader() == []


def test_manifests_of_two_tokenizers_are_refused(make_shards) -> None:
    train, other = make_shards(), make_shards(blocks=3, name="other")
    with pytest.raises(
        ValueError, match=r"data.validation_manifest: found tokenizer bytes \(sha256 193"
    ):
        module_of(train.location, validation_manifest=other.location)


def test_invalid_sizes_are_refused(make_shards) -> None:
    location = make_shards().location
    with pytest.raises(ValueError, match=r"24 is no multiple of micro-batch 5 times 2 ranks = 10"):
        module_of(location, micro_batch=5, world_size=2)
    with pytest.raises(ValueError, match="first_sample: 25 is no multiple of 24"):
        module_of(location, first_sample=25)
    for name, value in (
        ("workers", -1),
        ("validation_tokens", 0),
        ("on_bad_shard", "ignore"),
        ("max_bad_fraction", 1.5),
    ):
        with pytest.raises(ValueError, match=rf"data\.{name}: found {value!r}"):
            module_of(location, **{name: value})


def test_a_worker_reports_a_bad_shard_in_one_line(make_shards) -> None:
    manifest = make_shards()
    shard = Path(manifest.url_of("train-000001.tar"))
    shard.write_bytes(shard.read_bytes()[:-10])
    loader = module_of(manifest.location, workers=1, num_samples=72).train_dataloader()
    with pytest.raises(ShardError) as caught:
        list(loader)
    # Without this, the garbage collector would shut the workers down, which takes 5 s.
    loader._loader._iterator._shutdown_workers()
    assert str(caught.value) == f"shard {shard}: 10230 bytes, wanted 10240"


def test_a_worker_reports_a_failing_file_system_in_one_line(make_shards) -> None:
    manifest = make_shards()
    shard = Path(manifest.url_of("train-000001.tar"))
    shard.unlink()
    shard.symlink_to(shard)
    loader = module_of(manifest.location, workers=1, num_samples=72).train_dataloader()
    with pytest.raises(UnreadShardError) as caught:
        list(loader)
    loader._loader._iterator._shutdown_workers()
    assert str(caught.value) == f"shard {shard}: {os.strerror(errno.ELOOP)}"


def test_the_training_process_knows_what_workers_replaced(make_shards) -> None:
    manifest = make_shards()
    # Its replacement, the last shard, has only one document instead of three.
    Path(manifest.url_of("train-000002.tar")).unlink()
    module = module_of(
        manifest.location,
        workers=2,
        num_samples=72,
        on_bad_shard="replace",
        max_bad_fraction=0.5,
    )
    assert module.bad_shards == ()
    tokens = {t for batch in module.train_dataloader() for t in batch["target"].unique().tolist()}
    assert module.bad_shards == ("train-000002.tar",)
    assert not tokens & set(range(6 * 64, 9 * 64))


def test_a_copy_for_another_process_reads_the_same(make_shards) -> None:
    loader = module_of(make_shards().location).train_dataloader()
    dataset = loader._loader.dataset
    before = dataset[7].tokens.tolist()
    assert pickle.loads(pickle.dumps(dataset))[7].tokens.tolist() == before
