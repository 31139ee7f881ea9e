"""What is recorded of the code that a run ran on."""

import hashlib
import subprocess
from pathlib import Path

import pytest

from longhaul.modules import attention
from longhaul.pipeline.system import environment


def test_a_commit_is_clean_only_if_its_packages_hold_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=x", "-c", "user.email=x@example.org")
        subprocess.run(["git", "-C", tmp_path, *identity, *arguments], check=True)

    variants = tmp_path / "modules" / "attention"
    variants.mkdir(parents=True)
    (variants / "softmax.py").write_text("x = 1\n")
    (tmp_path / ".gitignore").write_text("__pycache__\n")
    git("init", "-q")
    git("add", "-A")
    git("commit", "-q", "-m", "first")
    monkeypatch.setattr(environment, "source_checkout", lambda: tmp_path)
    commit = environment.source_commit()
    assert commit is not None
    assert len(commit) == 40
    (tmp_path / "notes.txt").touch()  # beside the packages
    (variants / "__pycache__").mkdir()
    (variants / "__pycache__" / "softmax.pyc").touch()
    assert environment.source_commit() == commit
    (variants / "own.py").touch()
    assert environment.source_commit() == f"{commit}-dirty"
    (variants / "own.py").unlink()
    (variants / "softmax.py").write_text("x = 2\n")
    assert environment.source_commit() == f"{commit}-dirty"


def test_the_source_of_each_variant_is_identified() -> None:
    folder = Path(str(attention.__file__)).parent
    wanted = hashlib.sha256((folder / "conformal_sympow.py").read_bytes()).hexdigest()
    hashes = environment.describe_environment(["conformal_sympow", "softmax"])["attention_sha256"]
    assert hashes["conformal_sympow"] == wanted
    assert hashes["softmax"] != wanted
