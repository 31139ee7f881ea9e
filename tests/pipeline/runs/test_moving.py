"""Runs that were copied or moved, with their data and without."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from longhaul.configs import load_run_config
from longhaul.pipeline.benchmarks import kinds
from longhaul.pipeline.cli import main
from longhaul.pipeline.cluster import submission
from longhaul.pipeline.doctor import diagnosis
from longhaul.pipeline.runs.folder import RunFolder, load_run, stored_config
from longhaul.pipeline.runs.sweep import read_sweep

Run = Any  # conftest.RunFolder: modules of this folder cannot import each other


def copy_of(run: Run, folder: Path) -> Path:
    """A copy of a run folder that does not know where it was."""
    shutil.copytree(run.path / "small", folder)
    shutil.rmtree(folder / "evaluation", ignore_errors=True)
    text = (folder / "config.yaml").read_text()
    root = f'root: "{run.path}"'
    assert root in text
    (folder / "config.yaml").write_text(text.replace(root, "root: /nowhere"))
    return folder


def test_a_run_that_moves_with_its_data_reads_them_there(
    uninterrupted: Run, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Data and runs keep their place relative to each other.
    runs = tmp_path / "moved" / uninterrupted.path.name
    shards = os.path.normpath(runs / os.path.relpath(corpus, uninterrupted.path))
    shutil.copytree(corpus, shards)
    run = copy_of(uninterrupted, runs / "small")
    data = stored_config(RunFolder(run)).data
    assert data.manifest == f"{shards}/train"
    assert data.validation_manifest == f"{shards}/validation"
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", str(run), "--tasks", "bigram"]) == 0
    assert list((run / "evaluation").glob("*/bigram.json"))
    assert (run.parent / "mlflow.db").exists(), "its results went elsewhere"


def test_a_run_that_moves_alone_finds_its_data_where_they_were(
    uninterrupted: Run, corpus: Path, tmp_path: Path
) -> None:
    shutil.copytree(uninterrupted.path / "small", tmp_path / "far" / "away")
    config = stored_config(RunFolder(tmp_path / "far" / "away"))
    assert config.data.manifest == f"{corpus}/train"
    assert config.tracking.uri == f"sqlite:///{uninterrupted.path}/mlflow.db"


def test_every_command_reads_the_config_of_a_run_alike(
    uninterrupted: Run, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = uninterrupted.path / "small" / "config.yaml"
    found = [load_run(file), *read_sweep(str(file), [], ["trainer.seed=1,2"]).configs]
    found += [row.config for row in kinds._rows(str(file), [], ["softmax"], 1)]
    monkeypatch.setattr(diagnosis, "diagnose", lambda config: found.append(config) or 0)
    assert main(["doctor", str(file)]) == 0
    monkeypatch.setattr(submission, "_check", lambda configs, *options: found.extend(configs))
    assert main(["submit", str(file), "--dry-run"]) == 0
    assert len(found) == 6
    for config in found:
        assert config.data.manifest == f"{corpus}/train"
        assert config.data.validation_manifest == f"{corpus}/validation"
        assert config.tracking.uri == f"sqlite:///{uninterrupted.path}/mlflow.db"


def test_what_is_given_beside_the_config_of_a_run_begins_at_the_working_folder(
    uninterrupted: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = ["data.manifest=own", "data.validation_manifest=null", "name=other"]
    config = load_run(uninterrupted.path / "small" / "config.yaml", given)
    assert config.data.manifest == f"{tmp_path}/own"
    assert config.data.validation_manifest is None
    assert RunFolder.of(config).path == uninterrupted.path / "other"
    # In any other file they begin there too.
    config = load_run(uninterrupted.path / "small.yaml", given)
    assert config.data.manifest == f"{tmp_path}/own"


def test_a_config_beside_a_folder_of_data_is_not_a_run(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "config.yaml").write_text("inherits: [run/demo.yaml]\ndata: {manifest: data}")
    config = load_run(tmp_path / "config.yaml")
    assert (config.root, config.name) == ("runs", "demo")
    assert config.data.manifest == str(Path("data").absolute())


def test_paths_that_begin_at_the_working_folder_are_recorded_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunFolder(Path("runs", "one"))
    run.path.mkdir(parents=True)
    run.record_start(load_run_config("run/demo.yaml", ["tracking.uri=sqlite:///runs/mlflow.db"]))
    stored = stored_config(RunFolder(tmp_path / "runs" / "one"))
    assert stored.tracking.uri == f"sqlite:///{tmp_path}/runs/mlflow.db"


def test_the_config_of_a_moved_run_is_that_of_its_present_folder(
    uninterrupted: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = tmp_path / "far é" / "'away= "
    shutil.copytree(uninterrupted.path / "small", moved)
    assert RunFolder.of(load_run(moved / "config.yaml")).path == moved
    monkeypatch.chdir(moved / "logs")
    assert RunFolder.of(load_run("../config.yaml")).path == moved


def test_a_run_alone_generates_and_exports_and_is_told_where_its_data_are(
    uninterrupted: Run,
    corpus: Path,
    empty_store: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = copy_of(uninterrupted, tmp_path / "alone" / "small")
    shutil.copy(empty_store, tmp_path / "alone" / "mlflow.db")
    assert main(["generate", str(run), "--prompt", "x", "--tokens", "2"]) == 0
    assert main(["export", str(run), str(tmp_path / "exported")]) == 0
    capsys.readouterr()
    evaluate = ["evaluate", str(run), "--tasks", "positions"]
    assert main(evaluate) == 2
    assert "`longhaul evaluate --data FOLDER` reads moved data" in capsys.readouterr().err
    assert main([*evaluate, "--data", f"{corpus}/train"]) == 2
    assert main([*evaluate, "--data", str(corpus)]) == 0


def test_a_tokenizer_file_travels_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokenizers import Tokenizer, models

    from longhaul.datamodules.config import DataConfig
    from longhaul.pipeline.runs.data import copy_records, record_data, training_corpus

    vocabulary = {"a": 0, "b": 1, "<|endoftext|>": 2}
    Tokenizer(models.BPE(vocab=vocabulary, merges=[])).save(str(tmp_path / "tokenizer.json"))
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text("ab" * 64)
    options = ["--doc-tokens", "16", "--validation-fraction", "0.5"]
    options += ["--tokenizer", str(tmp_path / "tokenizer.json")]
    monkeypatch.chdir(tmp_path)
    assert main(["prepare", "text", *(f"{n}.txt" for n in range(4)), "shards", *options]) == 0
    folder, copy = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "copy")
    places = {"manifest": "shards/train", "validation_manifest": "shards/validation"}
    record_data(folder, DataConfig(**places, context=16))  # type: ignore[arg-type]
    shutil.rmtree(tmp_path / "shards")
    copy_records(folder, copy)
    assert (copy.data / "validation" / "manifest.json").exists()
    corpus = training_corpus(copy, None)  # type: ignore[arg-type]
    assert corpus.load_tokenizer().decode([1]) == "b"
