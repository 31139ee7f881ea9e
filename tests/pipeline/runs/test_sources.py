"""Whether the code of a kind is still the one that trained a run."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from longhaul.configs import load_run_config
from longhaul.pipeline.checkpoints.integrity import CHECKSUMS
from longhaul.pipeline.runs import folder as module
from longhaul.pipeline.runs.folder import RunFolder
from longhaul.pipeline.runs.trained_model import read_checkpoint
from longhaul.pipeline.system import environment

Run = Any  # conftest.RunFolder: modules of this folder cannot import each other


@pytest.fixture
def change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind's file is another one than before."""
    for place in (module, environment):
        monkeypatch.setattr(place, "source_hashes", lambda kinds: dict.fromkeys(kinds, "f" * 64))


def test_the_environment_is_the_one_that_the_run_began_with(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    config = load_run_config("run/demo.yaml")
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.record_start(config)
    first = folder.environment_file.read_text()
    before = json.loads(first)["attention_sha256"]["conformal_sympow"]
    assert folder.changed_sources(config.model.kinds) == []
    request.getfixturevalue("change")
    (line,) = folder.changed_sources(config.model.kinds)
    assert line == (
        f"{folder.path}: the file of kind conformal_sympow differs from the one that trained the "
        f"run: found sha256 ffffffffffff, wanted {before[:12]}"
    )
    checkpoint = folder.checkpoints / "step-000000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / CHECKSUMS).touch()
    folder.record_start(config)
    assert folder.environment_file.read_text() == first
    # A run that has saved nothing starts over.
    (checkpoint / CHECKSUMS).unlink()
    folder.record_start(config)
    assert folder.changed_sources(config.model.kinds) == []
    folder.environment_file.write_text("{")
    assert folder.changed_sources(config.model.kinds) == []


@pytest.mark.usefixtures("change")
def test_a_reader_of_a_run_is_told_once(
    uninterrupted: Run, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            read_checkpoint(uninterrupted.path / "small", lambda *_: None)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "small: the file of kind conformal_sympow differs from the one that trained" in line
