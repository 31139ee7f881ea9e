"""Several sources as batches: on any number of ranks, over kills, and what is refused."""

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from longhaul.datamodules.config import DataConfig, SourceConfig, StageConfig
from longhaul.datamodules.corpus import Corpus, corpus_of, load_record
from longhaul.datamodules.data_module import TokenDataModule
from longhaul.datamodules.manifest import Manifest
from longhaul.datamodules.preparation.packing import Packing
from longhaul.datamodules.preparation.resumable import Cursor, prepare_shards
from longhaul.datamodules.preparation.source_files import open_sources
from longhaul.datamodules.preparation.text import prepare_text
from longhaul.datamodules.shards import Block
from longhaul.datamodules.tokenizer import build_tokenizer

CONTEXT, UPDATE = 16, 42
WEIGHTS = {"web": 0.55, "code": 0.35, "books": 0.1}


@pytest.fixture
def mixture(make_shards) -> DataConfig:
    """Three sources, other weights after six updates."""
    sources = {
        name: SourceConfig(
            manifest=make_shards(blocks=10, docs_per_shard=2 + n, name=name).location,
            weight=WEIGHTS[name],
        )
        for n, name in enumerate(WEIGHTS)
    }
    later = StageConfig(at_tokens=6 * UPDATE * CONTEXT, weights={"web": 0.2, "books": 0.8})
    return DataConfig(
        sources=sources, schedule=[later], context=CONTEXT, workers=0, shuffle_shards=2
    )


def samples(
    data: DataConfig, first: int, updates: int, ranks: int
) -> dict[int, tuple[int, list[int]]]:
    """Source and tokens of each sample that so many ranks read together, by its index."""
    found = {}
    for rank in range(ranks):
        module = TokenDataModule(
            data,
            seed=3,
            samples_per_update=UPDATE,
            micro_batch={1: 2, 2: 3, 3: 2, 7: 3}[ranks],
            rank=rank,
            world_size=ranks,
            first_sample=first * UPDATE,
            num_samples=updates * UPDATE,
        )
        for batch in module.train_dataloader():
            rows = zip(batch["source"].tolist(), batch["target"].tolist(), strict=True)
            found |= dict(zip(batch["index"].tolist(), rows, strict=True))
    return found


@pytest.mark.wide
def test_every_update_is_the_same_on_any_number_of_ranks_and_after_kills(
    mixture: DataConfig,
) -> None:
    whole = samples(mixture, 0, 12, 1)
    assert sorted(whole) == list(range(12 * UPDATE))
    for ranks in (2, 3, 7):
        assert samples(mixture, 0, 12, ranks) == whole
    # Killed after 2 updates, and then after 7, and resumed on another number of ranks each time.
    pieces = samples(mixture, 0, 2, 3) | samples(mixture, 2, 5, 7) | samples(mixture, 7, 5, 2)
    assert pieces == whole
    source = np.array([whole[index][0] for index in range(12 * UPDATE)])
    shares = np.array([WEIGHTS[name] for name in mixture.sources])
    for updates in range(1, 7):
        counts = np.bincount(source[: updates * UPDATE], minlength=3)
        assert np.abs(counts - updates * UPDATE * shares).max() < 2
    counts = np.bincount(source[6 * UPDATE :], minlength=3)
    assert np.abs(counts - 6 * UPDATE * np.array([0.2, 0, 0.8])).max() < 2


class _Counting:
    """Two blocks of the numbers from 0 to 63."""

    version = 1
    dropped_tokens = empty_texts = 0

    def blocks(self, cursor: Cursor | None) -> Iterator[tuple[Block, Cursor]]:
        for number in range(2):
            yield Block(np.arange(64, dtype=np.uint32)), [number + 1]


@pytest.mark.parametrize("workers", [0, 2])
def test_sources_may_differ_in_type_in_blocks_and_in_what_is_known_of_documents(
    tmp_path: Path, workers: int
) -> None:
    tokenizer = build_tokenizer("bytes")
    (tmp_path / "a.txt").write_text("one\n" * 100)
    (text,) = prepare_text(
        open_sources([str(tmp_path / "a.txt")]), tmp_path / "a", tokenizer, packing=Packing(32)
    )
    template = dataclasses.replace(
        text, document_tokens=64, dtype="uint32", boundaries="none", shards=text.shards, source={}
    )
    plain = prepare_shards(
        tmp_path / "b",
        template,
        _Counting(),
        docs_per_shard=1,
        prefix="train",
        progress=lambda tokens: None,
    )
    assert (text.dtype, plain.dtype) == ("uint16", "uint32")
    data = DataConfig(
        sources={
            "text": SourceConfig(manifest=text.location),
            "plain": SourceConfig(manifest=plain.location),
        },
        context=CONTEXT,
        workers=workers,
    )
    module = TokenDataModule(
        data, seed=1, samples_per_update=8, micro_batch=8, rank=0, world_size=1, num_samples=32
    )
    seen = torch.cat([batch["source"] for batch in module.train_dataloader()])
    for batch in module.train_dataloader():
        for source, target, is_first in zip(
            batch["source"], batch["target"], batch["is_first"], strict=True
        ):
            if source == 0:
                assert set(target.tolist()) <= {*b"one\n", 256}
            else:
                assert target.tolist() == list(range(int(target[0]), int(target[0]) + CONTEXT))
                assert is_first.tolist() == [True] + [False] * (CONTEXT - 1)
    # No weights: shares are those of the sizes.
    sizes = [one.num_tokens // CONTEXT for one in (text, plain)]
    counts = torch.bincount(seen, minlength=2).tolist()
    assert abs(counts[0] - 32 * sizes[0] / sum(sizes)) < 2


def test_validation_reads_equally_much_of_each_source(make_shards) -> None:
    places = {name: make_shards(name=name).location for name in "ab"}
    sources = {
        name: SourceConfig(manifest=place, validation_manifest=place)
        for name, place in places.items()
    }
    data = DataConfig(sources=sources, context=CONTEXT, validation_tokens=6 * CONTEXT, workers=0)
    module = TokenDataModule(
        data, seed=0, samples_per_update=4, micro_batch=4, rank=0, world_size=1
    )
    batches = list(module.val_dataloader())
    real = torch.cat([batch["index"] for batch in batches]) >= 0
    assert torch.cat([batch["source"] for batch in batches])[real].tolist() == [0, 0, 0, 1, 1, 1]
    first = torch.cat([batch["target"][:, 0] for batch in batches])[real]
    assert first.tolist() == [0, CONTEXT, 2 * CONTEXT] * 2


def test_a_record_gives_names_shards_and_weights_back(mixture: DataConfig, tmp_path: Path) -> None:
    corpus = corpus_of(mixture)
    corpus.load_tokenizer = lambda: None  # type: ignore[assignment,return-value,method-assign]
    corpus.record(tmp_path / "record", with_tokenizer=True)
    found = load_record(tmp_path / "record")
    assert found.differs(corpus) == ""
    assert (found.names, found.stages) == (corpus.names, corpus.stages)
    assert found.fingerprint == corpus.fingerprint
    # What identifies the data read so far is the same whatever comes later.
    assert corpus.fingerprint_at(1000) == Corpus(corpus._named, corpus.stages[:1]).fingerprint
    assert corpus.fingerprint != corpus.fingerprint_at(1000)


def test_a_record_without_weights_is_refused(mixture: DataConfig, tmp_path: Path) -> None:
    corpus = corpus_of(mixture)
    corpus.load_tokenizer = lambda: None  # type: ignore[assignment,return-value,method-assign]
    corpus.record(tmp_path / "record", with_tokenizer=True)
    record = tmp_path / "record" / "sources.json"
    content = json.loads(record.read_text())
    content["stages"][0]["weights"] = {}
    record.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"sources.json: stages.0.*: found \{\}, wanted"):
        load_record(tmp_path / "record")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokenizer_sha256": "x"}, "found tokenizer bytes (sha256 x...), wanted bytes (sha256 "),
        ({"vocab_size": 999}, "found vocab_size 999, wanted 641"),
        ({"bos_id": 1}, "found bos_id 1, wanted 640"),
        ({"eot_id": 1}, "found eot_id 1, wanted 640"),
    ],
)
def test_sources_whose_ids_differ_are_refused_by_name(
    make_shards, changes: dict[str, object], said: str
) -> None:
    manifest: Manifest = make_shards()
    other = dataclasses.replace(manifest, **changes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=re.escape(f"data.sources.code: {said}")):
        Corpus({"web": manifest, "code": other})
