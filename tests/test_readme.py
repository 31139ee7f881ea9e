"""What the README shows is what happens."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from longhaul.pipeline.cli import main

README = (Path(__file__).parent.parent / "README.md").read_text()


def block_after(heading: str, language: str) -> str:
    section = README.split(f"## {heading}\n", 1)[1]
    found = re.search(rf"```{language}\n(.*?)```", section, re.DOTALL)
    assert found is not None
    return found[1]


def test_the_ten_lines_run(tmp_path: Path) -> None:
    code = block_after("Ten lines", "python")
    result = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert result.stdout.startswith("torch.Size([1, 1, 4, 64])")


# Most of a short command's time goes into its imports, so one process runs them all.
SESSION = """
import json, sys
from longhaul.pipeline.cli import main
for arguments in json.loads(sys.argv[1]):
    print("$", *arguments, file=sys.stderr, flush=True)
    status = main(arguments)
    if status:
        sys.exit(status)
"""

# Two updates and 2,048 tokens to validate on, not the whole budget.
BRIEF = ("trainer.max_tokens=8192", "optim.tokens_per_update=4096", "data.validation_tokens=2048")


def test_the_training_commands_run(tmp_path: Path) -> None:
    lines = [shlex.split(line, comments=True) for line in block_after("Train", "sh").splitlines()]
    commands = [
        [*line[1:], *(BRIEF if line[1] == "train" else ())]
        for line in lines
        if line[0] == "longhaul"
    ]
    assert len(commands) >= 6
    script = [sys.executable, "-P", "-c", SESSION, json.dumps(commands)]
    result = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    for name in ("demo", "wide"):
        assert json.loads((tmp_path / "runs" / name / "DONE").read_text())["step"] == 2
    assert list((tmp_path / "runs/demo/evaluation").glob("*/positions.png"))


def test_the_mistakes_print_what_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = block_after("Train", "console").split("$ ")[1:]
    assert len(shown) == 2
    for example in shown:
        command, _, message = example.partition("\n")
        assert main(shlex.split(command)[1:]) == 2
        assert capsys.readouterr().err.split() == message.split()
