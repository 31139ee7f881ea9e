"""Two ranks that are stopped, killed, hang or compute a NaN, and what is left of the run."""

import json
import os
import signal
import time
from typing import Any

import psutil
import pytest
import torch

from longhaul.pipeline.checkpoint import Saved, newest_checkpoint

Run = Any  # conftest.RunFolder: modules of this folder cannot import each other

TWO_RANKS = [
    "trainer.strategy=ddp",
    "trainer.devices=2",
    "trainer.micro_batch=2",
    "trainer.hang_seconds=60",
]


def start(run: Run, *overrides: str) -> Any:
    return run.start("train", "small.yaml", *TWO_RANKS, *overrides)


def end(process: Any, seconds: float = 120) -> tuple[int, str]:
    """Status and what was said on stderr; nothing of the run is alive afterwards."""
    _, error = process.communicate(timeout=seconds)
    deadline = time.monotonic() + 40
    while _alive(process.pid):
        assert time.monotonic() < deadline, f"orphans: {_alive(process.pid)}"
        time.sleep(0.2)
    return process.returncode, error


def _alive(group: int) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def rank_1(process: Any) -> psutil.Process:
    """The process of rank 1, which rank 0 started."""
    for child in psutil.Process(process.pid).children():
        if child.environ().get("LOCAL_RANK") == "1":
            return child
    raise AssertionError("no rank 1")


def steps_of(run: Run) -> int:
    """Updates that the trace has seen begin."""
    if not run.trace.exists():
        return -1
    lines = run.trace.read_text().splitlines()
    return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=-1)


def wait_for_step(run: Run, process: Any, step: int) -> None:
    deadline = time.monotonic() + 120
    while steps_of(run) < step:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, f"step {step} was not reached"
        time.sleep(0.02)


def weights(run: Run) -> dict[str, torch.Tensor]:
    newest = newest_checkpoint(run.path / "small" / "checkpoints")
    assert newest is not None
    return Saved(newest, "model").read_group("model")


def assert_same_end(run: Run, wanted: Run) -> None:
    found, expected = weights(run), weights(wanted)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    seen: dict[tuple[int, int], int] = {}
    for line in run.trace.read_text().splitlines():
        entry = json.loads(line)
        key = entry["step"], entry["index"][0]
        assert seen.setdefault(key, entry["crc"]) == entry["crc"], "a repeated step differs"
    assert sorted(index for _, index in seen) == list(range(0, 30 * 8, 2))


@pytest.fixture(scope="module")
def undisturbed(make_run: Any) -> Run:
    run = make_run()
    status, error = end(start(run))
    assert status == 0, error
    return run


def test_stopped_by_signal_and_file_the_run_goes_on_where_it_was(
    run: Run, undisturbed: Run
) -> None:
    def by_usr1_to_one_rank(process: Any) -> None:
        rank_1(process).send_signal(signal.SIGUSR1)

    def by_sigterm_to_all(process: Any) -> None:
        os.killpg(process.pid, signal.SIGTERM)

    def by_file(process: Any) -> None:
        (run.path / "small" / "STOP").touch()

    before = 0
    for step, ask in ((4, by_usr1_to_one_rank), (11, by_sigterm_to_all), (18, by_file)):
        process = start(run, "checkpoint.every_tokens=1000000")
        wait_for_step(run, process, step)
        ask(process)
        status, error = end(process)
        assert status == 75, error
        newest = newest_checkpoint(run.path / "small" / "checkpoints")
        assert newest is not None
        saved = int(newest.name.removeprefix("step-"))
        assert f"stopped after step {saved}, saved; the same command goes on" in error
        assert before < step <= saved < 30
        assert not (run.path / "small" / "DONE").exists()
        before = saved
    assert not (run.path / "small" / "STOP").exists()
    assert end(start(run))[0] == 0
    assert_same_end(run, undisturbed)


def test_save_on_request(run: Run) -> None:
    process = start(run, "checkpoint.every_tokens=1000000")
    wait_for_step(run, process, 2)
    (run.path / "small" / "SAVE").touch()
    assert end(process)[0] == 0
    assert not (run.path / "small" / "SAVE").exists()
    names = sorted(path.name for path in (run.path / "small" / "checkpoints").iterdir())
    assert len(names) == 2
    assert names[1] == "step-000000030"


def test_a_killed_rank_ends_the_job_by_name(run: Run, undisturbed: Run) -> None:
    process = start(run)
    wait_for_step(run, process, 8)
    rank_1(process).kill()
    status, error = end(process)
    assert status == 1
    assert "rank 1 is gone, last seen after step" in error
    process = start(run)
    wait_for_step(run, process, 16)
    os.killpg(process.pid, signal.SIGKILL)
    assert end(process)[0] == -signal.SIGKILL
    assert end(start(run))[0] == 0
    assert_same_end(run, undisturbed)


def test_a_rank_that_hangs_ends_the_job_by_name(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGHAUL_FAULT", "1:5:sleep")
    status, error = end(start(run, "trainer.hang_seconds=6"))
    assert status == 1
    assert "no progress for" in error
    assert "rank 1 after step 5" in error
    assert "traced_longhaul.py" in error


def test_a_second_signal_ends_at_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGHAUL_FAULT", "1:5:sleep")
    process = start(run)
    wait_for_step(run, process, 5)
    process.send_signal(signal.SIGUSR1)
    time.sleep(5)  # more than an update takes
    assert process.poll() is None
    process.send_signal(signal.SIGUSR2)
    status, error = end(process, seconds=30)
    assert status == 128 + signal.SIGUSR2
    assert "SIGUSR2 after SIGUSR1: ending without a checkpoint" in error


def test_a_stop_that_takes_too_long_ends(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGHAUL_FAULT", "1:5:sleep")
    process = start(run, "trainer.stop_seconds=2")
    wait_for_step(run, process, 5)
    process.send_signal(signal.SIGTERM)
    status, error = end(process, seconds=30)
    assert status == 128 + signal.SIGTERM
    assert "not stopped 2 s after SIGTERM" in error


def test_one_ranks_nan_skips_the_update_on_all(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGHAUL_FAULT", "1:5:nan")
    status, error = end(start(run))
    assert status == 0, error
    lines = (run.path / "small" / "logs" / "metrics.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    train = {e["step"]: e["values"] for e in entries if e["kind"] == "train"}
    assert [train[step]["train/skipped_updates"] for step in (5, 6, 30)] == [0, 1, 1]
    assert all(torch.isfinite(value).all() for value in weights(run).values())


def test_gradients_that_stay_nan_end_the_job_in_one_line(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONGHAUL_FAULT", "1:5-:nan")
    status, error = end(start(run, "optim.max_skipped_updates=3"))
    assert status == 1
    (line,) = [line for line in error.splitlines() if "longhaul" in line]
    assert line.startswith("longhaul: loss ")
    assert "found 3 updates in a row that are not finite, the last at step 8" in line
    assert not (run.path / "small" / "DONE").exists()


def test_a_rank_that_fails_alone_is_quoted(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGHAUL_FAULT", "1:5:raise")
    status, error = end(start(run))
    assert status == 1
    said = [line for line in error.splitlines() if line.startswith("longhaul:")]
    assert said[0] == "longhaul: no such luck"
    assert said[1].startswith("longhaul: rank 1 failed: RuntimeError: no such luck; ")
    assert len(said) == 2
