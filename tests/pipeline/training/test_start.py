"""How a run's processes start: ranks, data workers, and the processes that evaluate it."""

import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

Run = Any  # conftest.RunFolder: modules of this folder cannot import each other
TRACED = Path(__file__).parent.parent / "traced_longhaul.py"

TWO_RANKS = [
    "trainer.strategy=ddp",
    "trainer.devices=2",
    "trainer.micro_batch=2",
    "trainer.max_tokens=512",
    "trainer.hang_seconds=60",
]

# Notes each process that is forked without exec, and how many threads there are where it is forked.
NOTE_FORKS = """
import os, threading
def note():
    tasks, command = os.listdir("/proc/self/task"), open("/proc/self/cmdline").read()
    with open({file!r}, "a") as file:
        print(len(tasks), threading.active_count(), command.replace("\\0", " ")[:200], file=file)
os.register_at_fork(before=note)
"""


@pytest.mark.wide
def test_no_process_is_forked_from_one_with_threads(
    run: Run, fork: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = run.path / "forks"
    note = NOTE_FORKS.format(file=str(file))
    # For processes that are started anew, such as rank 1 and its fork server.
    monkeypatch.setenv("LONGHAUL_TEST_FAULT", note)
    code = f"{note}\nimport runpy; runpy.run_path({str(TRACED)!r}, run_name='__main__')"
    status, error = fork(code, run.path, "train", "small.yaml", *TWO_RANKS).end()
    assert status == 0, error
    status, error = fork(code, run.path, "evaluate", "small", "--devices", "2").end()
    assert status == 0, error
    forks = [line.split(maxsplit=2) for line in file.read_text().splitlines()]
    # Its fork server makes the workers of rank 1: to train, to validate, and to evaluate.
    assert len(forks) >= 3
    for tasks, threads, command in forks:
        assert (tasks, threads) == ("1", "1"), command
        assert "forkserver" in command


def test_a_killed_trainer_leaves_nothing_behind(run: Run) -> None:
    process = run.start("train", "small.yaml", "data.workers=2")
    run.wait_for_step(process, 2)
    started = psutil.Process(process.pid).children(recursive=True)
    assert len(started) >= 3
    process.send_signal(signal.SIGKILL)
    assert process.end(seconds=20)[0] == -signal.SIGKILL


@pytest.mark.soak
def test_300_starts_of_two_ranks_make_their_first_step(make_run: Any) -> None:
    num_starts = 300
    seconds = []
    run = make_run(1)
    for number in range(num_starts):
        began = time.monotonic()
        status, error = run.start("train", "small.yaml", *TWO_RANKS, f"name=start-{number}").end()
        seconds.append(time.monotonic() - began)
        assert status == 0, error
        assert (run.path / f"start-{number}" / "DONE").exists()
    slowest, median = max(seconds), sorted(seconds)[num_starts // 2]
    print(f"{num_starts} starts of two ranks, median {median:.1f} s, slowest {slowest:.1f} s")
