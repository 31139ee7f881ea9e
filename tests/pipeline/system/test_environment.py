"""What is recorded of the code that a run ran on."""

import hashlib
import json
import subprocess
import sys
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from longhaul.modules import attention
from longhaul.pipeline.system import environment, programs


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


def test_packages_are_those_of_which_python_knows() -> None:
    known = {one.metadata["Name"]: one.version for one in distributions()}
    assert environment.installed_packages() == known
    assert known.keys() >= {"torch", "longhaul"}


@pytest.mark.skipif(find_spec("triton") is None, reason="there is no Triton for this platform")
def test_on_a_gpu_the_configurations_of_the_kernels_are_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert environment.describe_environment([])["triton"] is None
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    properties = SimpleNamespace(major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    found = environment.describe_environment([])["triton"]
    assert found["chip"] == "sm_90"
    assert "BLOCK_T=64 num_warps=4" in found["configurations"]["sums of chunks, narrow"]
    assert json.loads(json.dumps(found)) == found


def test_driver_cuda_and_nccl_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment.describe_environment([])["driver"] is None
    nccl = SimpleNamespace(version=lambda: (2, 28, 9))
    monkeypatch.setitem(sys.modules, "torch.cuda.nccl", nccl)  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "nccl", nccl, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H100")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(programs, "output_of", lambda *command, **limits: "580.95.05")
    monkeypatch.setattr(environment, "_triton_configurations", lambda: None)
    found = environment.describe_environment([])
    wanted = {"cuda": "13.0", "driver": "580.95.05", "nccl": "2.28.9"}
    assert {key: found[key] for key in wanted} == wanted
