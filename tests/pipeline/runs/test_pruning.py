"""Reading a run while it is trained, and removes the checkpoint that was chosen."""

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from longhaul.pipeline.checkpoints import folders
from longhaul.pipeline.checkpoints.reader import SavedCheckpoint
from longhaul.pipeline.exporting.folder import export
from longhaul.pipeline.runs.ranks import Ranks
from longhaul.pipeline.runs.trained_model import load_trained_model

Run = Any  # conftest.RunFolder: modules of this folder cannot import each other


@pytest.fixture
def trained(uninterrupted: Run, tmp_path: Path) -> Path:
    """A run whose training goes on: `advance` saves a checkpoint and removes all others."""
    shutil.copytree(uninterrupted.path / "small", tmp_path / "small")
    return tmp_path / "small"


def advance(run: Path) -> None:
    newest, *others = sorted((run / "checkpoints").glob("step-*"), reverse=True)
    step = int(newest.name.removeprefix("step-")) + 1
    shutil.copytree(newest, run / "checkpoints" / f"step-{step:09d}")
    for path in (newest, *others):
        os.rename(path, path.with_name(f".removing-{path.name}"))


def advance_at_call(
    monkeypatch: pytest.MonkeyPatch, run: Path, owner: Any, name: str, times: int = 1
) -> None:
    """Train on, and remove what was chosen, at each of the first calls of a function."""
    original, calls = getattr(owner, name), []

    def advancing(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) <= times:
            advance(run)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, advancing)


@pytest.mark.parametrize(
    ("owner", "name"), [(SavedCheckpoint, "read_group"), (SavedCheckpoint, "__init__")]
)
def test_a_checkpoint_pruned_while_it_is_read_is_replaced_by_the_next(
    trained: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    owner: Any,
    name: str,
) -> None:
    advance_at_call(monkeypatch, trained, owner, name, times=2)
    assert load_trained_model(trained).checkpoint.name == "step-000000032"
    # torch would tell of it with a traceback.
    assert "Global metadata is not found" not in caplog.text


def test_a_checkpoint_pruned_while_it_is_chosen_is_not_called_damaged(
    trained: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    advance_at_call(monkeypatch, trained, folders, "verify")
    assert load_trained_model(trained).checkpoint.name == "step-000000031"
    assert "skipped" not in caplog.text


def test_a_checkpoint_pruned_while_it_is_exported_is_replaced_by_the_next(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from longhaul.pipeline.exporting import folder

    advance_at_call(monkeypatch, trained, folder, "write_shards")
    files = export(trained, tmp_path / "exported")
    assert "step-000000031" in next(f for f in files if f.name == "README.md").read_text()


def test_a_checkpoint_that_was_named_and_is_damaged_is_not_replaced(trained: Path) -> None:
    checkpoint = trained / "checkpoints" / "step-000000030"
    (checkpoint / "state.json").write_text("{}")
    with pytest.raises(OSError, match=r"step-000000030 is damaged: state.json"):
        load_trained_model(checkpoint)


def test_processes_that_read_together_choose_again_if_one_of_them_was_late(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @dataclasses.dataclass(frozen=True)
    class First(Ranks):
        """The first of two processes, of which the other fails to read once."""

        late: list[bool] = dataclasses.field(default_factory=lambda: [True])

        def gather(self, results: list[Any]) -> list[Any]:
            if results == [False] and self.late:
                self.late.clear()
                advance(trained)
                return [False, True]
            return results

    loaded = load_trained_model(trained, ranks=First())
    assert loaded.checkpoint.name == "step-000000031"
