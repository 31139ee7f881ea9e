"""Shorter contexts first: samples cut into pieces, in the same order, on any number of ranks."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from longhaul.datamodules.config import CutConfig, DataConfig, SourceConfig
from longhaul.datamodules.data_module import TokenDataModule
from longhaul.datamodules.preparation.packing import Packing
from longhaul.datamodules.preparation.source_files import open_sources
from longhaul.datamodules.preparation.text import prepare_text
from longhaul.datamodules.tokenizer import build_tokenizer

CONTEXT, UPDATE = 16, 12
# Of updates of 192 tokens the first has pieces of 4, the next two, since 500 are not whole
# updates, pieces of 8, and all others whole samples.
CUTS = [CutConfig(context=4, until_tokens=192), CutConfig(context=8, until_tokens=500)]
LENGTHS = [4, 8, 8, 16, 16]
BOS = 256


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    """Texts of many lengths, packed into blocks of 32 tokens, as two sources."""
    sources = {}
    for name in ("even", "odd"):
        lengths = [1, 2, 3, 9, 16, 1, 40, 7, 60, 5, 30] * 3
        texts = [chr(97 + n) * (length + (name == "odd")) for n, length in enumerate(lengths)]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (tmp_path / f"{name}.jsonl").write_text(lines)
        (manifest,) = prepare_text(
            open_sources([str(tmp_path / f"{name}.jsonl")]),
            tmp_path / name,
            build_tokenizer("bytes"),
            packing=Packing(32),
            docs_per_shard=2,
        )
        sources[name] = SourceConfig(manifest=manifest.location)
    return DataConfig(
        sources=sources, context=CONTEXT, short_first=CUTS, workers=0, shuffle_shards=2
    )


def batches(data: DataConfig, first: int = 0, updates: int = 5, rank: int = 0, ranks: int = 1):
    module = TokenDataModule(
        data,
        seed=5,
        samples_per_update=UPDATE,
        micro_batch=2,
        rank=rank,
        world_size=ranks,
        first_sample=first * UPDATE,
        num_samples=updates * UPDATE,
    )
    return list(module.train_dataloader())


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_are_cut_and_nothing_else_changes(data: DataConfig, workers: int) -> None:
    data = dataclasses.replace(data, workers=workers)
    whole = batches(dataclasses.replace(data, short_first=[]))
    cut = batches(data)
    assert len(cut) == len(whole) == 5 * UPDATE // 2
    for number, (found, wanted) in enumerate(zip(cut, whole, strict=True)):
        length = LENGTHS[number * 2 // UPDATE]
        pieces = CONTEXT // length
        assert found["target"].shape == (2 * pieces, length)
        assert torch.equal(found["target"].reshape(2, CONTEXT), wanted["target"])
        for key in ("index", "source"):
            assert found[key].tolist() == wanted[key].repeat_interleave(pieces).tolist()
        # A piece begins like a sequence; within it documents begin where they did.
        is_first = wanted["is_first"].reshape(-1, length).clone()
        is_first[:, 0] = True
        assert torch.equal(found["is_first"], is_first)
        before = found["target"].roll(1, 1)
        assert torch.equal(found["input"], before.masked_fill(is_first, BOS))


def test_pieces_without_a_mask_begin_with_the_bos_id(data: DataConfig) -> None:
    (found, *_) = batches(dataclasses.replace(data, document_mask=False))
    assert "is_first" not in found
    assert found["input"][:, 0].tolist() == [BOS] * 8
    assert torch.equal(found["input"][:, 1:], found["target"][:, :-1])


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.wide)])
def test_any_ranks_read_the_same_pieces_after_any_update(data: DataConfig, ranks: int) -> None:
    wanted = [row for batch in batches(data) for row in batch["input"].tolist()]
    for first in range(5):
        micro_steps = zip(
            *(batches(data, first, 5 - first, rank, ranks) for rank in range(ranks)), strict=True
        )
        found = [row for step in micro_steps for batch in step for row in batch["input"].tolist()]
        assert found == wanted[len(wanted) - len(found) :]
    assert len(found) == 2 * UPDATE - UPDATE


def test_validation_reads_whole_samples(data: DataConfig) -> None:
    places = data.manifests("manifest")
    config = data.with_manifests("validation_manifest", places)
    module = TokenDataModule(
        config, seed=5, samples_per_update=UPDATE, micro_batch=2, rank=0, world_size=1
    )
    assert all(batch["target"].shape == (2, CONTEXT) for batch in module.val_dataloader())


@pytest.mark.parametrize(
    ("cuts", "message"),
    [
        ([(5, 10)], r"data.short_first.0.context: found 5, wanted a divisor of data.context = 16"),
        ([(16, 10)], r"data.short_first.0.context: found 16, wanted a divisor"),
        ([(4, 10), (4, 20)], "data.short_first.1.context: found 4, wanted more than the 4 before"),
        ([(4, 10), (8, 10)], "data.short_first.1.until_tokens: found 10, wanted more than the 10"),
        ([(0, 10)], "data.short_first.0.context: found 0, wanted more than the 0"),
    ],
)
def test_bad_cuts_are_named(cuts: list[tuple[int, int]], message: str) -> None:
    given = [CutConfig(context=context, until_tokens=until) for context, until in cuts]
    with pytest.raises(ValueError, match=message):
        DataConfig(manifest="x", context=CONTEXT, short_first=given)
