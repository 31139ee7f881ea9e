"""What the README shows is what happens."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parent.parent / "README.md").read_text()
LONGHAUL = Path(sys.executable).parent / "longhaul"


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


def test_the_training_commands_run(tmp_path: Path) -> None:
    for line in block_after("Train", "sh").splitlines():
        command = shlex.split(line, comments=True)
        if command[0] != "longhaul":
            continue
        command[0] = str(LONGHAUL)
        if command[1] == "train":
            command.append("trainer.max_tokens=16384")  # two updates, not the whole budget
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert result.returncode == 0, f"{line}\n{result.stdout}\n{result.stderr}"
    assert list((tmp_path / "runs/demo/evaluation").glob("*/positions.png"))


def test_the_mistakes_print_what_is_shown(tmp_path: Path) -> None:
    shown = block_after("Train", "console").split("$ ")[1:]
    assert len(shown) == 2
    for example in shown:
        command, _, message = example.partition("\n")
        arguments = [str(LONGHAUL), *shlex.split(command)[1:]]
        result = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True)
        assert result.returncode == 2
        assert result.stderr.split() == message.split()
