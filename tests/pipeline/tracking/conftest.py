"""A store that trackers share, and a run folder."""

from pathlib import Path

import pytest
from tracked_runs import copied

from longhaul.pipeline.tracking import tracker as tracker_module


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker_module, "FIRST_UPLOAD_S", 0.05)
    monkeypatch.setattr(tracker_module, "UPLOAD_EVERY_S", 0.05)
    monkeypatch.setattr(tracker_module, "MAX_BACKOFF_S", 0.1)


@pytest.fixture(scope="module")
def store(empty_store: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return copied(empty_store, tmp_path_factory.mktemp("store"))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"
