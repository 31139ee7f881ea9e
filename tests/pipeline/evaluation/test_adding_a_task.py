"""The task of docs/adding-a-task.md, as a file of the folder."""

import argparse
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from made_runs import run, with_rows

from longhaul.pipeline.cli import main
from longhaul.pipeline.commands.evaluate import add_task_arguments, task_options
from longhaul.pipeline.evaluation import registry, tasks
from longhaul.pipeline.evaluation.run import check_options
from longhaul.pipeline.evaluation.task import Option, Task
from longhaul.pipeline.reporting import evaluations
from longhaul.pipeline.reporting.tables import TABLES, read_table
from longhaul.pipeline.reporting.variants import NamedRuns
from longhaul.pipeline.runs.trained_model import load_trained_model

Run = Any  # conftest.RunFolder: modules of this folder cannot import each other

PAGE = Path(__file__).parents[3] / "docs" / "adding-a-task.md"


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> registry.Task:
    """The task of the page, registered while a test runs."""
    found = re.search(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert found is not None
    (tmp_path / "copy.py").write_text(found[1])
    monkeypatch.setattr(tasks, "__path__", [*tasks.__path__, str(tmp_path)])
    task = registry.read_task(tmp_path / "copy.py")
    monkeypatch.setitem(registry.TASKS, "copy", task)
    for table in task.module.TABLES:
        monkeypatch.setitem(TABLES, table.name, table)
    return task


def test_one_file_adds_a_task_with_its_option_check_table_and_figure(
    copy: registry.Task,
    uninterrupted: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        main(["evaluate", "--help"])
    printed = capsys.readouterr().out
    assert (
        "--copied N,N,...      copy: lengths of the pieces in tokens; default a quarter" in printed
    )
    assert "copy        loss of pieces of --copied tokens that come a second time" in printed
    with pytest.raises(ValueError, match="--stride: found with copy, which does not read it"):
        check_options(["copy"], {"stride": 3}, devices=1)
    trained = load_trained_model(uninterrupted.path / "small")
    with pytest.raises(ValueError, match="--copied: found 33, wanted at most 32"):
        copy.module.check(trained, copy.options_from({"copied": (33,)}))
    result = copy.module.measure(trained, copy.options_from({"copied": (8, 32)}), tmp_path)
    assert [*result.values] == ["evaluation/copy_loss_000008", "evaluation/copy_loss_000032"]
    rows = read_table("copy", result.files[0].read_text(), "copy.csv")
    assert [row["copied"] for row in rows] == [8, 32]
    runs = [with_rows(run(kind, [3.0]), copy=rows) for kind in ("softmax", "linear")]
    make = partial(evaluations.charts, TABLES["copy"])
    assert [one.name for one in make(NamedRuns(runs))] == ["copy_000064", "gap_copy_000064"]


def test_a_file_without_options_that_can_be_given_is_named(tmp_path: Path) -> None:
    begun = '"""Half a task."""\n'
    for content, wanted in (
        ("", "found no class Options, wanted that of"),
        (
            "class Options:\n    more: set[str] = ()\n",
            r"more: found set\[str\], wanted one of int, ",
        ),
        ("class Options:\n    more: int\n", "more: found no default, wanted one"),
    ):
        (tmp_path / "half.py").write_text(begun + content)
        with pytest.raises(ValueError, match=wanted):
            registry.read_task(tmp_path / "half.py")


def test_a_half_written_file_takes_no_other_task_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "good.py").write_text('"""Good."""\nclass Options:\n    more: float = 0.5\n')
    (tmp_path / "half.py").write_text("def measure(\n")
    (tmp_path / ".#good.py").symlink_to("an editor's lock")
    monkeypatch.setattr(tasks, "__file__", str(tmp_path / "__init__.py"))
    ((name, task),) = registry._tasks()
    assert (name, task.options["more"].default) == ("good", 0.5)
    assert "half.py: left out, it is no task: " in caplog.text
    assert "#good.py" not in caplog.text
    # Nor does one that cannot be imported end a report.
    monkeypatch.setitem(registry.TASKS, "half", Task("longhaul.no_such_module", "", {}))
    assert "positions" in registry.task_tables.__wrapped__()
    assert "half: its tables are left out: " in caplog.text


def test_an_option_is_of_a_type_that_an_argument_can_have(monkeypatch: pytest.MonkeyPatch) -> None:
    def add(kind: str) -> argparse.ArgumentParser:
        task = Task("", "", {"more": Option(kind, None, "more")})
        monkeypatch.setitem(registry.TASKS, "new", task)
        parser = argparse.ArgumentParser()
        add_task_arguments(parser)
        return parser

    assert add("float | None").parse_args(["--more", "0.5"]).more == 0.5


def test_two_tasks_may_have_other_defaults_of_one_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.TASKS, "new", Task("", "", {"prompts": Option("int", 5, "more")}))
    parser = argparse.ArgumentParser()
    add_task_arguments(parser)
    given = parser.parse_args(["--prompts", "20"])
    assert task_options(given, ["new"]) == {"prompts": 20}


def test_the_help_imports_no_torch() -> None:
    script = (
        "import argparse, sys; from longhaul.pipeline.commands import evaluate; "
        "evaluate.add_arguments(argparse.ArgumentParser()); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-P", "-c", script]).returncode == 0
