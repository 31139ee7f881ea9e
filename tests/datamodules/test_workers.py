"""Worker processes: what they do to be read from, and what is said when they do not."""

import importlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from longhaul.datamodules import workers
from longhaul.datamodules.config import DataConfig
from longhaul.datamodules.data_module import TokenDataModule
from longhaul.datamodules.workers import WorkerLoader

# Imported by workers, which have the test's sys.path.
HANGING = """
import logging, time

def begin(worker):
    time.sleep(3600)

class Windows:
    def __getitems__(self, indices):
        logging.getLogger("reader").warning("%s is slow", "the disk")
        if indices[0]:
            time.sleep(3600)
        return indices
"""


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "hanging.py").write_text(HANGING)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("hanging")
    del sys.modules["hanging"]


@pytest.fixture
def loader_of(make_shards: Any) -> Callable[[int], WorkerLoader]:
    location = make_shards().location

    def make(workers: int) -> WorkerLoader:
        data = TokenDataModule(
            DataConfig(manifest=location, context=16, workers=workers, shuffle_shards=2),
            **{"seed": 5, "samples_per_update": 24, "micro_batch": 2, "rank": 0, "world_size": 1},
        )
        loader = data.train_dataloader()._loader
        assert isinstance(loader, WorkerLoader)
        return loader

    return make


def test_a_worker_that_does_not_begin_is_named(
    loader_of: Any, hanging: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "_SECONDS_TO_BEGIN", 2.0)
    loader = loader_of(1)
    loader.worker_init_fn = hanging.begin
    with pytest.raises(RuntimeError, match=r"data worker 0 \(process \d+\): not begun 2 s after"):
        next(iter(loader))


def test_a_worker_that_reads_no_first_batch_is_named_and_ended(
    loader_of: Any, hanging: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = loader_of(2)
    # The second batch, which the second worker reads.
    loader.dataset._windows = hanging.Windows()
    monkeypatch.setattr(workers, "_SECONDS_TO_READ", 2.0)
    wanted = r"data worker 1 \(process \d+\): no batch 2 s .* disk of .*/manifest.json answers"
    with pytest.raises(RuntimeError, match=wanted):
        next(iter(loader))


def test_what_workers_log_reaches_the_trainers_handlers(
    loader_of: Any, hanging: Any, caplog: pytest.LogCaptureFixture
) -> None:
    loader = loader_of(1)
    loader.dataset._windows = hanging.Windows()
    assert list(next(iter(loader))) == [0, 1]
    assert [record.getMessage() for record in caplog.records] == ["the disk is slow"]
    assert caplog.records[0].name == "reader"
    loader.kill_workers()


def test_workers_leave_signals_to_the_trainer(loader_of: Any) -> None:
    loader = loader_of(1)
    batches = iter(loader)
    next(batches)
    (worker,) = loader._iterator._workers
    for number in (*workers._SIGNALS, signal.SIGINT):
        os.kill(worker.pid, number)
    for expected in range(1, 20):
        assert next(batches).indices[0] == 2 * expected
    assert worker.is_alive()


# Data that is loaded by a process which has other threads, imports late, and is in a folder where a
# module of the standard library is hidden.
SCRIPT = """
    import os, sys, time
    from longhaul.datamodules import workers
    from longhaul.datamodules.config import DataConfig
    from longhaul.datamodules.data_module import TokenDataModule

    os.register_at_fork(before=lambda: print("a fork", flush=True))
    data = TokenDataModule(
        DataConfig(manifest={location!r}, context=16, workers=1),
        seed=0, samples_per_update=2, micro_batch=2, rank=0, world_size=1,
    )
    batches = iter(data.train_dataloader())
    next(batches)
    {then}
"""


def run_script(folder: Path, location: str, then: str) -> "subprocess.Popen[str]":
    (folder / "queue.py").write_text("raise SystemExit('the current folder was searched')")
    # A script that does not ask whether it is `__main__`: workers do not run it again.
    (folder / "script.py").write_text(textwrap.dedent(SCRIPT).format(location=location, then=then))
    return subprocess.Popen(
        [sys.executable, "-P", "script.py"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.wide
@pytest.mark.parametrize(
    ("then", "status"),
    [
        # With the loader still open.
        ("raise SystemExit(3)", 3),
        # The semaphores of its queues are then removed by a process that is silent about it.
        ("os.kill(os.getpid(), 9)", -signal.SIGKILL),
        # A worker that is stopped does not hold its trainer.
        ("os.kill(batches.gi_frame.f_locals['self']._loader._iterator._workers[0].pid, 19)", 0),
    ],
)
def test_a_process_ends_with_all_that_it_has_started(
    tmp_path: Path, make_shards: Any, then: str, status: int
) -> None:
    process = run_script(tmp_path, make_shards().location, then)
    # To the end of what it has started: all of it may write to its output.
    out, _ = process.communicate(timeout=100)
    assert (process.returncode, out) == (status, "")


@pytest.mark.wide
def test_a_fork_server_that_does_not_answer_ends_the_wait(tmp_path: Path, make_shards: Any) -> None:
    then = """
    os.kill(workers.forkserver._forkserver._forkserver_pid, 19)
    workers._SECONDS_TO_BEGIN = 0.5
    try:
        next(iter(data.train_dataloader()))
    except RuntimeError as error:
        print(error)
    os._exit(0)
    """
    out, _ = run_script(tmp_path, make_shards().location, textwrap.dedent(then)).communicate()
    assert "did not answer within 0 s, wanted workers" in out or "within 1 s, wanted" in out
