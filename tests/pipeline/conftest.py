"""A small corpus, a small run, and a `longhaul` that runs in a process of its own."""

import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parent.parent.parent
TRACED = Path(__file__).parent / "traced_longhaul.py"

SMALL_RUN = """
name: small
root: {root}
model:
  layers: 2
  width: 32
  heads: 2
  vocabulary: 320
  attention: {{kind: conformal_sympow}}
data:
  manifest: {corpus}/train
  validation_manifest: {corpus}/validation
  validation_samples: 6
  context: 64
optim:
  tokens_per_update: 512
  learning_rate: 3.0e-3
  schedule: {{name: cosine, warmup_tokens: 2048}}
trainer:
  max_tokens: {max_tokens}
  micro_batch: 4
  validate_every_tokens: 5120
checkpoint:
  every_tokens: 2048
tracking:
  uri: sqlite:///{root}/mlflow.db
  experiment: tests
"""


@dataclass(frozen=True)
class RunFolder:
    """A working folder with `small.yaml` in it, and the commands run there."""

    path: Path

    @property
    def trace(self) -> Path:
        return self.path / "trace.jsonl"

    def longhaul(
        self, *arguments: str, check: bool = True, largest_file: int | None = None
    ) -> "subprocess.CompletedProcess[str]":
        """`longhaul ARGUMENTS` to its end; no file may grow beyond `largest_file` bytes."""
        process = self.start(*arguments)
        if largest_file is not None:
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (largest_file, largest_file))
        out, error = process.communicate(timeout=300)
        if check:
            assert process.returncode == 0, f"{out}\n{error}"
        return subprocess.CompletedProcess(arguments, process.returncode, out, error)

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        """`longhaul ARGUMENTS` on one thread, each training batch appended to trace.jsonl."""
        return subprocess.Popen(
            [sys.executable, "-P", str(TRACED), *arguments],
            cwd=self.path,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )


MakeRun = Callable[..., RunFolder]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of this project's own sources, in short documents; other files for validation."""
    run = RunFolder(tmp_path_factory.mktemp("corpus"))
    for name, source in (("train", "modules"), ("validation", "configs")):
        (run.path / source).mkdir()
        for index, file in enumerate(sorted((CHECKOUT / source).glob("*.py"))):
            (run.path / source / f"{index:03d}.txt").write_text(file.read_text())
        options = ("--doc-tokens", "1024", "--docs-per-shard", "4")
        run.longhaul("prepare", "text", source, f"shards/{name}", *options)
    return run.path / "shards"


@pytest.fixture(scope="session")
def make_run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> MakeRun:
    """A new folder for a small run of the given number of updates."""

    def make(num_updates: int = 30) -> RunFolder:
        folder = tmp_path_factory.mktemp("run")
        text = SMALL_RUN.format(root=folder, corpus=corpus, max_tokens=512 * num_updates)
        (folder / "small.yaml").write_text(text)
        return RunFolder(folder)

    return make


@pytest.fixture(scope="session")
def uninterrupted(make_run: MakeRun) -> RunFolder:
    """A run of 30 updates that nothing disturbed."""
    run = make_run()
    run.longhaul("train", "small.yaml")
    return run


@pytest.fixture
def run(make_run: MakeRun) -> RunFolder:
    """A run of 30 updates, not yet started."""
    return make_run()
