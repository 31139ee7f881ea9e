"""What a run folder keeps of its data, and what counts as the same data."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from longhaul.configs import ConfigError, load_run_config
from longhaul.datamodules.config import DataConfig
from longhaul.datamodules.manifest import load_manifest
from longhaul.pipeline.runs.data import check_same_data, record_data, with_moved_data
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


def test_data_that_were_deleted_may_be_gone_only_from_where_they_were(
    begun: tuple[RunFolder, DataConfig], tmp_path: Path
) -> None:
    folder, data = begun
    gone = dataclasses.replace(data, manifest=f"{tmp_path}/gone")
    check_same_data(folder, gone, gone, may_be_gone=True)
    for before, may_be_gone in ((data, True), (gone, False)):
        with pytest.raises(ConfigError, match=r"data.manifest: .*gone: no such"):
            check_same_data(folder, gone, before, may_be_gone=may_be_gone)
