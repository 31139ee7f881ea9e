"""Results of tasks in a folder that may come from another machine."""

import json
from pathlib import Path
from typing import Any

import pytest

from longhaul.pipeline.evaluation.options import ContextOptions
from longhaul.pipeline.evaluation.results import Results
from longhaul.pipeline.evaluation.task import TaskResult


def results(folder: Path) -> Results:
    """A folder in which one task has a result."""
    (folder / "new.csv").write_text("1")
    found = Results(folder / "results", "")
    stored = found.store("positions", TaskResult({"loss": 1.5}, (folder / "new.csv",)))
    found.mark_complete("positions", ContextOptions(), stored)
    return found


@pytest.mark.parametrize(
    "change",
    [
        {"values": []},
        {"values": {"loss": "1.5"}},
        {"values": None},
        {"files": "new.csv"},
        {"files": ["../new.csv"]},
        {"files": ["/etc/passwd"]},
        {"files": [3]},
        {"options": []},
        None,
    ],
)
def test_a_damaged_result_is_measured_again(change: dict[str, Any] | None, tmp_path: Path) -> None:
    found = results(tmp_path)
    assert found.values() == {"loss": 1.5}
    assert found.stored("positions", ContextOptions()) is not None
    path = found.folder / "positions.json"
    record = json.loads(path.read_text())
    path.write_text("[" * 5000 if change is None else json.dumps(record | change))
    assert found.stored("positions", ContextOptions()) is None
    assert found.values() == {}
