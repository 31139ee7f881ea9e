"""Two ranks that are stopped, killed, hang or compute a NaN, and what is left of the run."""

import json
import os
import pty
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from mlflow.tracking import MlflowClient

from longhaul.pipeline.checkpoints.folders import newest_checkpoint
from longhaul.pipeline.checkpoints.reader import SavedCheckpoint
from longhaul.pipeline.training.preemption import StopRequests

TRACED = str(Path(__file__).parents[1] / "traced_longhaul.py")
Run = Any  # conftest.RunFolder: modules of this folder cannot import each other

TWO_RANKS = [
    "trainer.strategy=ddp",
    "trainer.devices=2",
    "trainer.micro_batch=2",
    "trainer.hang_seconds=60",
]


def start(run: Run, *overrides: str) -> Any:
    return run.start("train", "small.yaml", *TWO_RANKS, *overrides)


def weights(run: Run) -> dict[str, torch.Tensor]:
    newest = newest_checkpoint(run.path / "small" / "checkpoints")
    assert newest is not None
    return SavedCheckpoint(newest, "model").read_group("model")


def assert_same_end(run: Run, wanted: Run, num_updates: int = 30) -> None:
    found, expected = weights(run), weights(wanted)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    seen: dict[tuple[int, int], int] = {}
    for line in run.trace.read_text().splitlines():
        entry = json.loads(line)
        key = entry["step"], entry["index"][0]
        assert seen.setdefault(key, entry["crc"]) == entry["crc"], "a repeated step differs"
    assert sorted(index for _, index in seen) == list(range(0, num_updates * 8, 2))
    client = MlflowClient(f"sqlite:///{run.path}/mlflow.db")
    experiment = client.get_experiment_by_name("tests")
    assert experiment is not None
    (tracked,) = client.search_runs([experiment.experiment_id])
    assert tracked.info.status == "FINISHED"
    history = client.get_metric_history(tracked.info.run_id, "curves/train_loss")
    assert sorted(point.step for point in history) == list(range(1, num_updates + 1))


@pytest.fixture(scope="module")
def undisturbed(make_run: Any) -> Run:
    run = make_run()
    status, error = start(run).end()
    assert status == 0, error
    return run


@pytest.mark.wide
def test_stopped_and_killed_the_run_ends_with_the_same_weights(run: Run, undisturbed: Run) -> None:
    process = start(run, "checkpoint.every_tokens=1000000")
    run.wait_for_step(process, 4)
    process.rank_1().send_signal(signal.SIGUSR1)
    status, error = process.end()
    assert status == 75, error
    newest = newest_checkpoint(run.path / "small" / "checkpoints")
    assert newest is not None
    saved = int(newest.name.removeprefix("step-"))
    assert 4 <= saved < 12
    assert f"stopped after step {saved}, saved; run the same command to resume" in error
    process = start(run)
    run.wait_for_step(process, 14)
    process.rank_1().kill()
    status, error = process.end()
    assert status == 1
    assert "rank 1 is gone, last seen after step" in error
    assert start(run).end()[0] == 0
    assert_same_end(run, undisturbed)


@pytest.mark.soak
def test_stopped_and_killed_a_run_of_muon_ends_with_the_same_weights(make_run: Any) -> None:
    options = ("optim.name=muon", "trainer.strategy=fsdp")
    whole, run = make_run(), make_run()
    assert start(whole, *options).end()[0] == 0
    process = start(run, *options)
    run.wait_for_step(process, 6)
    process.rank_1().send_signal(signal.SIGUSR1)
    assert process.end()[0] == 75
    process = start(run, *options)
    run.wait_for_step(process, 14)
    process.rank_1().kill()
    assert process.end()[0] == 1
    assert start(run, *options).end()[0] == 0
    assert_same_end(run, whole)


@pytest.mark.wide
def test_stopped_by_signal_and_file_the_run_goes_on_where_it_was(
    run: Run, undisturbed: Run
) -> None:
    def by_usr1_to_one_rank(process: Any) -> None:
        process.rank_1().send_signal(signal.SIGUSR1)

    def by_sigterm_to_all(process: Any) -> None:
        os.killpg(process.pid, signal.SIGTERM)

    def by_file(process: Any) -> None:
        (run.path / "small" / "STOP").touch()

    before = 0
    for step, ask in ((4, by_usr1_to_one_rank), (11, by_sigterm_to_all), (18, by_file)):
        process = start(run, "checkpoint.every_tokens=1000000")
        run.wait_for_step(process, step)
        ask(process)
        status, error = process.end()
        assert status == 75, error
        newest = newest_checkpoint(run.path / "small" / "checkpoints")
        assert newest is not None
        saved = int(newest.name.removeprefix("step-"))
        assert f"stopped after step {saved}, saved; run the same command to resume" in error
        assert before < step <= saved < 30
        assert not (run.path / "small" / "DONE").exists()
        before = saved
    assert not (run.path / "small" / "STOP").exists()
    assert (run.path / "small" / "STOPPED").exists()
    assert start(run).end()[0] == 0
    assert not (run.path / "small" / "STOPPED").exists()
    assert_same_end(run, undisturbed)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_closed_terminal_asks_to_stop_unless_nohup_was_asked(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup may have started the tests
    try:
        with StopRequests(tmp_path, 90) as requests:
            requests.mark_ranks_connected()
            os.kill(os.getpid(), signal.SIGHUP)
            wait_until(lambda: requests.wants_stop)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with StopRequests(tmp_path, 90) as requests:
            requests.mark_ranks_connected()
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGUSR1)  # of two signals, the second is no request
            wait_until(lambda: requests.wants_stop)
            assert requests._received == signal.SIGUSR1
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_to_the_whole_job_step_ends_no_compiler(tmp_path: Path) -> None:
    with StopRequests(tmp_path, 90) as requests:
        requests.mark_ranks_connected()
        with subprocess.Popen(["sleep", "60"]) as compiler:
            compiler.send_signal(signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGUSR1)
            wait_until(lambda: requests.wants_stop)
            assert compiler.poll() is None
            compiler.kill()
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {signal.SIGUSR1}


@pytest.mark.wide
def test_a_signal_before_the_training_asks_to_run_it_again(
    run: Run, fork: Callable[..., Any]
) -> None:
    code = (
        "import os, signal, sys\n"
        "from longhaul.pipeline.cli import main\n"
        "from longhaul.pipeline.runs import folder\n"
        "folder.load_run = lambda *_: os.kill(os.getpid(), signal.SIGTERM)\n"
        "sys.exit(main(['train', 'small.yaml']))\n"
    )
    assert fork(code, run.path).end() == (75, "longhaul: SIGTERM before the training began\n")


@pytest.mark.wide
def test_a_run_whose_terminal_is_closed_saves(run: Run) -> None:
    train = [sys.executable, TRACED, "train", "small.yaml", "checkpoint.every_tokens=1000000"]
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup may have started the tests
        os.chdir(run.path)
        os.execv(sys.executable, train)
    while run.last_step < 4:
        os.read(terminal, 1000)
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 75
    assert newest_checkpoint(run.path / "small" / "checkpoints") is not None


@pytest.mark.wide
def test_what_one_rank_alone_refuses_ends_the_job_and_changes_nothing(
    run: Run, corpus: Path
) -> None:
    assert start(run, "trainer.max_tokens=1024").end()[0] == 0
    before = {path: path.read_bytes() for path in (run.path / "small").glob("*.*")}
    done = (run.path / "small" / "DONE").read_text()
    shutil.copytree(corpus / "train", run.path / "rank0")
    # Rank 0, which has no LOCAL_RANK until it starts the others, has these data; rank 1 has not.
    data = f"data.manifest={run.path}/rank${{oc.env:LOCAL_RANK,0}}"
    status, error = start(run, data).end(seconds=60)
    assert status == 2, error
    assert "rank1: no such manifest" in error.splitlines()[-1]
    assert {path: path.read_bytes() for path in before} == before
    assert (run.path / "small" / "DONE").read_text() == done


@pytest.mark.wide
def test_ctrl_c_to_any_rank_is_an_interrupt(run: Run) -> None:
    process = start(run, "checkpoint.every_tokens=1000000")
    run.wait_for_step(process, 4)
    process.rank_1().send_signal(signal.SIGINT)
    status, error = process.end()
    assert status == 130, error
    assert "updates after step 0 are not saved; SIGTERM, or a file" in error
    assert error.splitlines()[-1] == "longhaul: interrupted"


@pytest.mark.wide
def test_save_on_request(run: Run) -> None:
    process = start(run, "checkpoint.every_tokens=1000000")
    run.wait_for_step(process, 2)
    (run.path / "small" / "SAVE").touch()
    assert process.end()[0] == 0
    assert not (run.path / "small" / "SAVE").exists()
    names = sorted(path.name for path in (run.path / "small" / "checkpoints").iterdir())
    assert len(names) == 2
    assert names[1] == "step-000000030"


@pytest.mark.wide
def test_a_killed_rank_ends_the_job_by_name(run: Run, undisturbed: Run) -> None:
    process = start(run)
    run.wait_for_step(process, 8)
    process.rank_1().kill()
    status, error = process.end()
    assert status == 1
    assert "rank 1 is gone, last seen after step" in error
    process = start(run)
    run.wait_for_step(process, 16)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.end()[0] == -signal.SIGKILL
    assert start(run).end()[0] == 0
    assert_same_end(run, undisturbed)


@pytest.mark.wide
def test_a_rank_that_hangs_ends_the_job_by_name(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGHAUL_FAULT", "1:5:sleep")
    status, error = start(run, "trainer.hang_seconds=6").end()
    assert status == 1
    assert "no progress for" in error
    assert "rank 1 after step 5" in error
    assert "traced_longhaul.py" in error
    logs = run.path / "small" / "logs"
    assert f"what all ranks were doing is in {logs}/stacks-rank-*.txt" in error
    for rank in (0, 1):
        stacks = (logs / f"stacks-rank-{rank}.txt").read_text()
        assert stacks.count("(most recent call first):") > 2, "all threads"
        is_asleep = re.search(r'call first\):\n  File ".*traced_longhaul.py"', stacks) is not None
        assert is_asleep == (rank == 1), stacks


@pytest.mark.parametrize(
    "who",
    [
        pytest.param("rank 0", marks=pytest.mark.soak),
        pytest.param("rank 1", marks=pytest.mark.wide),
        pytest.param("both ranks", marks=pytest.mark.soak),
        pytest.param("a data worker", marks=pytest.mark.soak),
    ],
)
def test_who_is_stopped_for_a_while_goes_on(run: Run, undisturbed: Run, who: str) -> None:
    process = start(run, "trainer.hang_seconds=100")
    run.wait_for_step(process, 5)
    ranks = [psutil.Process(process.pid), process.rank_1()]
    everyone = [one for rank in ranks for one in (rank, *rank.children(recursive=True))]
    (worker, *_) = [one for one in everyone if one.name() == "pt_data_worker"]
    stopped = {
        "rank 0": ranks[:1],
        "rank 1": ranks[1:],
        "both ranks": ranks,
        "a data worker": [worker],
    }[who]
    for one in stopped:
        one.suspend()
    time.sleep(60)  # three times as long as a rank may be silent before it is told of
    assert process.poll() is None
    for one in stopped:
        one.resume()
    status, error = process.end()
    assert status == 0, error
    assert_same_end(run, undisturbed)


@pytest.mark.soak
def test_a_second_signal_ends_at_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGHAUL_FAULT", "1:5:sleep")
    process = start(run)
    run.wait_for_step(process, 5)
    # A scheduler may say the same in two ways.
    process.send_signal(signal.SIGUSR1)
    process.send_signal(signal.SIGTERM)
    time.sleep(5)  # more than an update takes
    assert process.poll() is None
    process.send_signal(signal.SIGUSR2)
    status, error = process.end(seconds=30)
    assert status == 128 + signal.SIGUSR2
    assert re.search("SIGUSR2 after SIG(USR1|TERM): ending without a checkpoint", error)


@pytest.mark.soak
def test_a_stop_that_takes_too_long_ends(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGHAUL_FAULT", "1:5:sleep")
    process = start(run, "trainer.stop_seconds=2")
    run.wait_for_step(process, 5)
    process.send_signal(signal.SIGTERM)
    status, error = process.end(seconds=30)
    assert status == 128 + signal.SIGTERM
    assert "not stopped 2 s after SIGTERM" in error


@pytest.mark.wide
def test_one_ranks_nan_skips_the_update_on_all(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGHAUL_FAULT", "1:5:nan")
    status, error = start(run).end()
    assert status == 0, error
    lines = (run.path / "small" / "logs" / "metrics.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    train = {e["step"]: e["values"] for e in entries if e["kind"] == "train"}
    assert [train[step]["train/skipped_updates"] for step in (5, 6, 30)] == [0, 1, 1]
    assert all(torch.isfinite(value).all() for value in weights(run).values())


@pytest.mark.wide
def test_gradients_that_stay_nan_end_the_job_in_one_line(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONGHAUL_FAULT", "1:5-:nan")
    status, error = start(run, "optim.max_skipped_updates=3").end()
    assert status == 1
    said = [line for line in error.splitlines() if line.startswith("longhaul:")]
    # A busy machine may make either rank slow, and that is said too.
    *skipped, line = [line for line in said if " is slow: " not in line]
    assert [text.split(",")[0] for text in skipped] == [
        f"longhaul: step {step} is skipped" for step in (6, 7, 8)
    ]
    assert line.startswith("longhaul: loss ")
    assert "found 3 updates in a row that had to be skipped, the last at step 8" in line
    assert not (run.path / "small" / "DONE").exists()


@pytest.mark.wide
def test_a_rank_that_fails_alone_is_quoted(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGHAUL_FAULT", "1:5:raise")
    status, error = start(run).end()
    assert status == 1
    said = [line for line in error.splitlines() if line.startswith("longhaul:")]
    assert said[0] == "longhaul: no such luck"
    assert said[1].startswith("longhaul: rank 1 failed: RuntimeError: no such luck; ")
    assert len(said) == 2


UPDATES = 600
WAYS_TO_DIE = ("one rank", "all ranks", "SIGUSR1", "SIGTERM", "saving", "validating")


def strike(run: Run, process: Any, way: str, chance: random.Random) -> bool:
    """End a run in a way at once, or when it saves or validates; whether it was asked to stop."""
    checkpoints = run.path / "small" / "checkpoints"
    deadline = time.monotonic() + 60
    while way == "saving" and not any(checkpoints.glob(".saving-*")):
        assert time.monotonic() < deadline
    while way == "validating" and not (run.path / "validating").exists():
        assert time.monotonic() < deadline
    if way == "all ranks" or (way in ("saving", "validating") and chance.random() < 0.5):
        os.killpg(process.pid, signal.SIGKILL)
    elif way == "SIGTERM":
        os.killpg(process.pid, signal.SIGTERM)
    else:
        number = signal.SIGUSR1 if way == "SIGUSR1" else signal.SIGKILL
        chance.choice([process, process.rank_1()]).send_signal(number)
    return way.startswith("SIG")


@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_killed_25_times_in_every_way_a_run_ends_as_if_it_had_not_been(
    make_run: Any, strategy: str
) -> None:
    options = [f"trainer.strategy={strategy}", "checkpoint.every_tokens=2048"]
    undisturbed, run = make_run(UPDATES), make_run(UPDATES)
    assert start(undisturbed, *options).end(seconds=600)[0] == 0
    chance = random.Random(strategy)
    ways = chance.sample(5 * WAYS_TO_DIE, 25)
    hits, slowest = 0, 0.0
    for way in ways:
        process = start(run, *options)
        before = run.last_step
        # A new process begins with the step of its checkpoint, which the trace may have already.
        wait_for_lines(run, process, chance.randrange(2, 40))
        time.sleep(chance.random() * 0.05)
        is_asked = strike(run, process, way, chance)
        hits += way == "validating" and (run.path / "validating").exists()
        began = time.monotonic()
        status, error = process.end(seconds=90)
        slowest = max(slowest, time.monotonic() - began)
        assert status == (75 if is_asked else status), error
        assert status != 0, "it was over before it was killed"
        (run.path / "validating").unlink(missing_ok=True)
        print(f"{strategy}: {way} at step {before} to {run.last_step}, status {status}")
    assert hits > 0
    assert start(run, *options).end(seconds=600)[0] == 0
    assert_same_end(run, undisturbed, UPDATES)
    print(f"{strategy}: {len(ways)} kills, the slowest end took {slowest:.1f} s")


def wait_for_lines(run: Run, process: Any, count: int) -> None:
    """Until a process has begun `count` more micro-batches."""
    before = run.trace.read_bytes().count(b"\n") if run.trace.exists() else 0
    deadline = time.monotonic() + 120
    while not run.trace.exists() or run.trace.read_bytes().count(b"\n") < before + count:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.005)


def wait_for_rank_1(process: Any) -> psutil.Process:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with suppress(AssertionError, psutil.Error):
            found = process.rank_1()
            assert isinstance(found, psutil.Process)
            return found
        time.sleep(0.01)
    raise AssertionError("rank 1 was not started")


@pytest.mark.wide
@pytest.mark.parametrize(
    ("number", "status", "said"),
    [
        (signal.SIGINT, 130, "interrupted while waiting for other ranks"),
        (signal.SIGTERM, 75, "SIGTERM while waiting for other ranks"),
    ],
)
def test_a_rank_that_waits_for_the_others_can_be_ended(
    run: Run, number: signal.Signals, status: int, said: str
) -> None:
    process = start(run)
    wait_for_rank_1(process).suspend()
    time.sleep(2)  # until rank 0 waits for it
    process.send_signal(number)
    ended, error = process.end(seconds=30)
    assert ended == status, error
    assert said in error
