"""What is left of a rank that hangs, or whose GPU has no memory left."""

import multiprocessing
import multiprocessing.pool
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from longhaul.configs import RunConfig, load_run_config
from longhaul.pipeline.cli import main
from longhaul.pipeline.training import post_mortem
from longhaul.pipeline.training import run as training
from longhaul.pipeline.training.callback import TrainingCallback

SMALL = (
    "model.width=64",
    "model.heads=4",
    "model.layers=1",
    "data.context=128",
    "optim.tokens_per_update=512",
)


def test_stacks_of_all_threads_and_nccls_record_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    c10d = torch._C._distributed_c10d
    monkeypatch.setattr(c10d, "_dump_nccl_trace", lambda: b"record", raising=False)
    goes_on = threading.Event()

    def waits_in_another_thread() -> None:
        goes_on.wait(20)

    thread = threading.Thread(target=waits_in_another_thread)
    thread.start()
    post_mortem.leave_stacks(tmp_path, 3)
    goes_on.set()
    thread.join()
    stacks = (tmp_path / "stacks-rank-3.txt").read_text()
    assert "in waits_in_another_thread" in stacks
    assert "in test_stacks_of_all_threads" in stacks
    assert (tmp_path / "nccl-rank-3").read_bytes() == b"record"


def test_nothing_keeps_a_rank_from_ending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> bytes:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_nccl_trace", fail, raising=False)
    post_mortem.leave_stacks(tmp_path, 0)
    post_mortem.leave_stacks(tmp_path / "away", 0)
    os.mkfifo(tmp_path / "stacks-rank-1.txt")
    post_mortem.leave_stacks(tmp_path, 1)  # does not wait for a reader
    (tmp_path / "stacks-rank-1.txt").unlink()
    assert [path.name for path in tmp_path.iterdir()] == ["stacks-rank-0.txt"]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of 80 GB is pretended, and planning is not done in a process of its own."""
    cuda, properties = torch.cuda, SimpleNamespace(total_memory=80 * 10**9)
    threads = SimpleNamespace(Pool=multiprocessing.pool.ThreadPool)
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "current_device", lambda: 0)
    monkeypatch.setattr(cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(cuda.memory, "_dump_snapshot", lambda path: Path(path).write_text(""))
    monkeypatch.setattr(multiprocessing, "get_context", lambda how: threads)


class _NoMemory:
    """A trainer whose update finds no memory left."""

    global_rank = 0
    strategy = SimpleNamespace(launcher=None)

    def __init__(self) -> None:
        self.callbacks: list[Any] = []

    def fit(self, module: Any, datamodule: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.mark.usefixtures("gpu")
def test_no_memory_is_a_line_with_the_smallest_change_that_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = []
    logs = tmp_path / "x" / "logs"
    logs.mkdir(parents=True)

    def train(config: RunConfig) -> int:
        this: Any = SimpleNamespace(config=config, data=None, recorder=None)
        this.report_failure = lambda error: said.append(str(error)) or ""
        trainer, module = cast(Any, _NoMemory()), cast(Any, None)
        training._fit(trainer, module, this)
        return 0

    monkeypatch.setattr(training, "train", train)
    overrides = (*SMALL, "trainer.micro_batch=4", f"root={tmp_path}", "name=x")
    assert main(["train", "run/demo.yaml", *overrides]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("longhaul: trainer.micro_batch: found 4, for which the 80 GB of a GPU")
    assert f"{logs}/memory-rank-*.pickle" in line
    # By the plan the run fits; it did not, so what fits needs less.
    advice = line.partition("; the smallest")[2]
    assert advice.startswith(" change that would fit: trainer.micro_batch=2 (")
    assert (logs / "train.log").read_text() == line.removeprefix("longhaul: ") + "\n"
    assert (logs / "memory-rank-0.pickle").exists()
    assert line.startswith(f"longhaul: {said[0]}"), "the other ranks are told the same"


@pytest.mark.usefixtures("gpu")
def test_from_the_first_update_on_it_is_noted_what_takes_a_gpus_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noted = []
    monkeypatch.setattr(
        torch.cuda.memory, "_record_memory_history", lambda *args, **options: noted.append(args)
    )
    this: Any = SimpleNamespace(requests=SimpleNamespace(install_handlers=lambda: None))
    trainer: Any = SimpleNamespace(fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace()))
    TrainingCallback.on_train_start(this, trainer, cast(Any, None))
    assert noted == [("state",)]


@pytest.mark.usefixtures("gpu")
def test_other_errors_stay_what_they_are(tmp_path: Path) -> None:
    error = RuntimeError("found no file")
    assert post_mortem.explain(error, load_run_config("run/demo.yaml"), tmp_path, 0) is error
    assert not list(tmp_path.iterdir())


def test_every_rank_that_is_ended_leaves_its_stacks(tmp_path: Path) -> None:
    this: Any = SimpleNamespace(
        _folder=SimpleNamespace(log_file=tmp_path / "train.log"), recorder=None
    )
    TrainingCallback._end_at_once(this, 1)
    assert (tmp_path / "stacks-rank-1.txt").is_file()
