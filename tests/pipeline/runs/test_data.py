"""What a run folder keeps of its data, and what counts as the same data."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from longhaul.configs import ConfigError, load_run_config
from longhaul.datamodules.config import DataConfig, SourceConfig, StageConfig
from longhaul.datamodules.manifest import load_manifest
from longhaul.pipeline.runs.data import (
    check_run,
    check_same_data,
    record_data,
    recorded_corpus,
    with_moved_data,
)
from longhaul.pipeline.runs.folder import RunFolder


@pytest.fixture
def begun(corpus: Path, tmp_path: Path) -> tuple[RunFolder, DataConfig]:
    """A run folder that has recorded its data, and these data."""
    data = DataConfig(
        manifest=f"{corpus}/train", validation_manifest=f"{corpus}/validation", context=64
    )
    folder = RunFolder(tmp_path / "run")
    record_data(folder, data)
    return folder, data


def moved(data: DataConfig, folder: Path, **changes: Any) -> DataConfig:
    """The data with their training manifest in another folder, and with these changes to it."""
    folder.mkdir()
    dataclasses.replace(load_manifest(data.manifest), **changes).save(folder)
    return dataclasses.replace(data, manifest=str(folder))


def test_moved_data_are_the_same(begun: tuple[RunFolder, DataConfig], tmp_path: Path) -> None:
    folder, data = begun
    check_same_data(folder, data, data, may_be_gone=False)
    elsewhere = moved(data, tmp_path / "moved", dropped_tokens=7, source={"kind": "another"})
    check_same_data(folder, elsewhere, data, may_be_gone=False)


def test_a_tilde_where_data_are_now_is_the_home_folder(
    begun: tuple[RunFolder, DataConfig], corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = begun
    config = load_run_config("run/demo.yaml")
    monkeypatch.setenv("HOME", str(corpus.parent))
    found, _ = with_moved_data(folder, config, f"~/{corpus.name}")
    assert found.data.manifest == f"{corpus}/train/manifest.json"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"document_tokens": 512}, "found document_tokens 512 in .*, wanted 1024 as in"),
        ({"bos_id": 0}, "found bos_id 0 in"),
        (
            {"tokenizer_sha256": "x"},
            r"found tokenizer bytes \(sha256 x...\) in .*, wanted bytes \(sha256",
        ),
    ],
)
def test_another_packing_or_tokenizer_is_named(
    begun: tuple[RunFolder, DataConfig], tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    folder, data = begun
    other = moved(data, tmp_path / "other", **changes)
    with pytest.raises(ConfigError, match=f"data.manifest: {said}"):
        check_same_data(folder, other, data, may_be_gone=False)


def test_shards_in_another_order_are_other_shards(
    begun: tuple[RunFolder, DataConfig], tmp_path: Path
) -> None:
    folder, data = begun
    shards = load_manifest(data.manifest).shards
    other = moved(data, tmp_path / "other", shards=shards[::-1])
    with pytest.raises(ConfigError, match=r"data.manifest: found other shards in .*other"):
        check_same_data(folder, other, data, may_be_gone=False)


@pytest.fixture
def sources(corpus: Path, tmp_path: Path) -> tuple[RunFolder, DataConfig]:
    """A run folder that has recorded two sources, and these data."""
    places = {"web": f"{corpus}/train", "code": f"{corpus}/validation"}
    data = DataConfig(
        sources={name: SourceConfig(manifest=one, weight=0.5) for name, one in places.items()},
        context=64,
    )
    folder = RunFolder(tmp_path / "run")
    record_data(folder, data)
    return folder, data


def weighted(data: DataConfig, weight: float, from_tokens: int | None = None) -> DataConfig:
    code = dataclasses.replace(data.sources["code"], weight=weight)
    sources = {**data.sources, "code": code}
    return dataclasses.replace(data, sources=sources, from_tokens=from_tokens)


def test_weights_change_only_from_a_token_that_is_not_trained(
    sources: tuple[RunFolder, DataConfig],
) -> None:
    folder, data = sources
    check_same_data(folder, data, data, 1000, may_be_gone=False)
    changed = "data.sources: found weights web 666667, code 333333, wanted web 500000, code 500000"
    told = (
        rf"{changed} as in {folder.data}/train/sources.json; repeat what the command line has set"
    )
    with pytest.raises(ConfigError, match=rf"{told} .*data.from_tokens=1000 lets others hold"):
        check_same_data(folder, weighted(data, 0.25), data, 1000, may_be_gone=False)
    with pytest.raises(ConfigError, match=r"data.from_tokens: found 999, wanted 1000 or more"):
        check_same_data(folder, weighted(data, 0.25, 999), data, 1000, may_be_gone=False)
    # What differs further on is shown too.
    stage = StageConfig(at_tokens=2000, weights={"web": 1, "code": 3})
    scheduled = dataclasses.replace(data, schedule=[stage])
    told = (
        r"^data.sources: found web 1, code 3 from 2000 tokens on, wanted no change of weights "
        r"as in .*sources.json; repeat what the command line has set before, or data.from_tokens="
    )
    with pytest.raises(ConfigError, match=told):
        check_same_data(folder, scheduled, data, 1000, may_be_gone=False)
    # A source that the run has read must be there still; its weight may be 0.
    later = weighted(data, 0.25, 1000)
    gone = dataclasses.replace(later, sources={"web": later.sources["web"]})
    with pytest.raises(ConfigError, match=r"data.sources: found no code, which the run has read"):
        check_same_data(folder, gone, data, 1000, may_be_gone=False)
    later = weighted(data, 0, 1000)
    check_same_data(folder, later, data, 1000, may_be_gone=False)
    # From then on the same command goes on, and so does a further change.
    record_data(folder, later)
    check_same_data(folder, later, data, 5000, may_be_gone=False)
    again = weighted(data, 3, 6000)
    check_same_data(folder, again, data, 5000, may_be_gone=False)
    record_data(folder, again)
    recorded = recorded_corpus(folder, "manifest")
    assert recorded is not None
    assert [tuple(stage) for stage in recorded.stages] == [
        (0, {"web": 500_000, "code": 500_000}),
        (1000, {"web": 1_000_000}),
        (6000, {"web": 142_857, "code": 857_143}),
    ]


def test_other_shards_of_a_source_and_another_form_of_the_data_are_refused(
    sources: tuple[RunFolder, DataConfig],
) -> None:
    folder, data = sources
    swapped = data.with_manifests(
        "manifest", {"web": data.sources["web"].manifest, "code": data.sources["web"].manifest}
    )
    with pytest.raises(ConfigError, match=r"data.sources: found other shards of code in"):
        check_same_data(folder, swapped, data, may_be_gone=False)
    alone = DataConfig(manifest=data.sources["web"].manifest, context=64)
    with pytest.raises(ConfigError, match=r"data.manifest: found .*, wanted the sources web, code"):
        check_same_data(folder, alone, data, may_be_gone=False)


def test_a_budget_that_needs_more_than_max_epochs_is_refused(corpus: Path, tmp_path: Path) -> None:
    places = {"web": f"{corpus}/train", "code": f"{corpus}/validation"}
    options = [f"data.sources.{name}.manifest={place}" for name, place in places.items()]
    options += ["data.manifest=null", "data.validation_manifest=null", "data.context=64"]
    options += ["optim.tokens_per_update=512", "trainer.micro_batch=1", "data.schedule=[]"]
    options += ["data.sources.web.weight=9", "data.sources.code.weight=1"]
    options += ["data.sources.code.max_epochs=0.5", f"root={tmp_path}"]
    there = load_manifest(places["code"]).num_tokens
    config = load_run_config("run/demo.yaml", [*options, "trainer.max_tokens=10M"])
    with pytest.raises(ConfigError) as caught:
        check_run(config)
    said = str(caught.value)
    assert said.startswith("data.sources.code: 1,000")
    assert f"for trainer.max_tokens, there are {there:,} x max_epochs 0.5; " in said
    most = int(re.findall(r"trainer.max_tokens=(\d+) trains at most", said)[0])
    check_run(load_run_config("run/demo.yaml", [*options, f"trainer.max_tokens={most}"]))
    with pytest.raises(ConfigError, match=r"max_epochs 0.5"):
        check_run(load_run_config("run/demo.yaml", [*options, f"trainer.max_tokens={most + 1}"]))


def test_moved_sources_are_found_by_their_shards(
    sources: tuple[RunFolder, DataConfig], corpus: Path
) -> None:
    folder, data = sources
    config = dataclasses.replace(
        load_run_config("run/demo.yaml"),
        data=data.with_manifests("manifest", {"web": "gone", "code": "gone"}),
    )
    found, keys = with_moved_data(folder, config, str(corpus))
    assert keys == {"data.sources.web.manifest", "data.sources.code.manifest"}
    assert found.data.manifests("manifest") == {
        "web": f"{corpus}/train/manifest.json",
        "code": f"{corpus}/validation/manifest.json",
    }


def test_data_that_were_deleted_may_be_gone_only_from_where_they_were(
    begun: tuple[RunFolder, DataConfig], tmp_path: Path
) -> None:
    folder, data = begun
    gone = dataclasses.replace(data, manifest=f"{tmp_path}/gone")
    check_same_data(folder, gone, gone, may_be_gone=True)
    for before, may_be_gone in ((data, True), (gone, False)):
        with pytest.raises(ConfigError, match=r"data.manifest: .*gone: no such"):
            check_same_data(folder, gone, before, may_be_gone=may_be_gone)
