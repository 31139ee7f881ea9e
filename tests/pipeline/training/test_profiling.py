"""What is seen of the ranks of a run while it trains, and that looking changes nothing."""

import gzip
import json
import logging
import math
import os
import random
import re
import shutil
import socket
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from longhaul.pipeline.checkpoints.folders import newest_checkpoint
from longhaul.pipeline.checkpoints.reader import SavedCheckpoint
from longhaul.pipeline.training.preemption import StopRequests
from longhaul.pipeline.training.profiling import Communication, communication, covered
from longhaul.pipeline.training.stragglers import StragglerReport

Run = Any  # conftest.RunFolder: modules of this folder cannot import each other

UPDATES = 6
TWO_RANKS = ["trainer.strategy=ddp", "trainer.devices=2", "trainer.micro_batch=2"]


def train(run: Run, *overrides: str) -> tuple[int, str]:
    process = run.start("train", "small.yaml", "data.workers=0", *overrides)
    _, error = process.communicate()
    return process.returncode, error


def ask(run: Run, updates: str) -> Path:
    """The file PROFILE, made before the run starts."""
    file: Path = run.path / "small" / "PROFILE"
    file.parent.mkdir()
    file.write_text(updates)
    return file


def traces(run: Run) -> dict[str, Counter[str]]:
    """How often each event is in each trace."""
    found = {}
    for file in sorted((run.path / "small" / "profile").iterdir()):
        with gzip.open(file) as text:
            found[file.name] = Counter(event["name"] for event in json.load(text)["traceEvents"])
    return found


def metrics(run: Run) -> dict[int, dict[str, float]]:
    lines = (run.path / "small" / "logs" / "metrics.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    return {e["step"]: e["values"] for e in entries if e["kind"] == "train"}


@pytest.fixture(scope="module")
def watched(make_run: Any) -> Run:
    """Two ranks, of which the second is slow; two updates are sampled, two others traced."""
    run = make_run(UPDATES)
    ask(run, "2\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LONGHAUL_FAULT", "1:3-:slow")
        status, error = train(run, *TWO_RANKS)
    assert status == 0, error
    return run


@pytest.mark.wide
def test_the_slow_rank_is_named(watched: Run) -> None:
    logs = watched.path / "small" / "logs"
    lines = [json.loads(line) for line in (logs / "ranks.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [5, 6]
    for line in lines:
        assert line["hosts"] == [socket.gethostname()] * 2
        # It sleeps for as long as that in its two batches; the other waits meanwhile.
        assert line["work"][1] >= 0.6
        assert line["work"][0] < line["work"][1]
        values = metrics(watched)[line["step"]]
        assert values["train/slowest_rank"] == 1
        assert values["train/slowest_over_median_work"] > 1.25
    said = re.findall(
        r"rank (\d) on (\S+) is slow: .* of step (\d)", (logs / "train.log").read_text()
    )
    assert said == [("1", socket.gethostname(), "6")]


@pytest.mark.wide
def test_communication_is_a_part_of_the_update(watched: Run) -> None:
    logs = watched.path / "small" / "logs"
    line = json.loads((logs / "ranks.jsonl").read_text().splitlines()[0])
    values = metrics(watched)[5]
    for whole, exposed in zip(line["communication"], line["exposed_communication"], strict=True):
        assert 0 < exposed <= whole < values["train/step_seconds"]
    mean = sum(line["communication"]) / 2
    assert values["train/communication_seconds"] == pytest.approx(mean, abs=1e-5)
    assert values["train/checkpoint_seconds"] > 0  # of the checkpoint of step 4
    assert "train/checkpoint_seconds" not in metrics(watched)[4]


@pytest.mark.wide
def test_a_trace_has_the_updates_asked_for(watched: Run) -> None:
    assert not (watched.path / "small" / "PROFILE").exists()
    found = traces(watched)
    assert list(found) == [f"step-000000002-rank-0000{rank}.json.gz" for rank in (0, 1)]
    for events in found.values():
        assert events["Optimizer.step#AdamW.step"] == 2
        assert events["longhaul::power_forward"] == 2 * 2 * 2  # updates, micro-batches, layers
        assert events["gloo:all_reduce"]
        # DDP has two, of its buckets, and the reports of each of two updates one. One a batch would
        # make waiting for a rank look like waiting for data.
        assert events["gloo:broadcast"] <= 4


@pytest.mark.wide
def test_a_run_that_is_watched_ends_with_the_same_weights(
    watched: Run, make_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONGHAUL_UNSAMPLED", "1")
    alone = make_run(UPDATES)
    status, error = train(alone, *TWO_RANKS)
    assert status == 0, error
    assert not (alone.path / "small" / "logs" / "ranks.jsonl").exists()
    assert not (alone.path / "small" / "profile").exists()
    ends = []
    for run in (watched, alone):
        newest = newest_checkpoint(run.path / "small" / "checkpoints")
        assert newest is not None
        ends.append(SavedCheckpoint(newest, "model").read_group("model"))
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[1])
    losses = [
        [values["curves/train_loss"] for values in metrics(run).values()]
        for run in (watched, alone)
    ]
    assert losses[0] == losses[1]


@pytest.mark.wide
def test_a_run_that_fails_in_a_trace_writes_what_there_is(
    make_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(UPDATES)
    ask(run, "100")
    monkeypatch.setenv("LONGHAUL_FAULT", "0:4:raise")
    status, error = train(run)
    # The process would die of a signal, were the profiler left running.
    assert status == 1, error
    assert "no such luck" in error
    (events,) = traces(run).values()
    assert events["Optimizer.step#AdamW.step"] == 3  # updates 2, 3 and 4


@pytest.mark.parametrize(
    ("content", "wanted"),
    [("", 3), ("7\n", 7), ("0", 0), ("101", 0), ("three", 0), ("-2", 0), ("9" * 5000, 0)],
)
def test_a_bad_request_is_said_and_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str, wanted: int
) -> None:
    file = tmp_path / "PROFILE"
    requests = StopRequests(tmp_path, deadline_s=1)
    assert requests.updates_to_trace == 0
    file.write_text(content)
    assert requests.updates_to_trace == wanted
    assert file.exists() == bool(wanted)
    said = f"found {content!r:.40}, wanted nothing or a number of updates, 1 to 100"
    assert (said in caplog.text) == (not wanted)


@pytest.mark.parametrize("name", ["STOP", "SAVE", "PROFILE"])
@pytest.mark.parametrize(
    ("make", "found"),
    [
        (os.mkfifo, "a FIFO"),
        (Path.mkdir, "a folder"),
        (lambda path: path.symlink_to(path.parent), "a link"),
        (lambda path: path.symlink_to("nowhere"), "a link"),
    ],
)
def test_what_is_no_file_is_no_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, make: Any, found: str
) -> None:
    requests = StopRequests(tmp_path, deadline_s=1)
    file = tmp_path / name
    make(file)
    for _ in range(2):
        asked = requests.wants_stop, requests.wants_save, requests.updates_to_trace
        assert asked == (False, False, 0)
    assert caplog.messages == [f"{file}: found {found}, wanted a regular file; it is ignored"]
    # The same name is a request later, even where the file system gives the same inode again.
    shutil.rmtree(file) if found == "a folder" else file.unlink()
    file.touch()
    asked = requests.wants_stop, requests.wants_save, requests.updates_to_trace
    assert asked == (name == "STOP", name == "SAVE", 3 * (name == "PROFILE"))


def test_a_request_that_cannot_be_removed_is_met_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    requests = StopRequests(tmp_path, deadline_s=1)
    for name in ("STOP", "SAVE", "PROFILE"):
        (tmp_path / name).touch()
    monkeypatch.setattr(Path, "unlink", refuse)
    monkeypatch.setattr(Path, "rename", refuse)
    assert requests.wants_stop
    assert requests.wants_save
    requests.clear_stop_and_save()
    requests.clear_profile()
    assert (requests.wants_stop, requests.wants_save, requests.updates_to_trace) == (0, 0, 0)
    assert [one.partition("cannot be ")[2] for one in caplog.messages] == [
        "removed: Operation not permitted; it is ignored",
        "renamed to STOPPED: Operation not permitted; it is ignored",
        "removed: Operation not permitted; it is ignored",
    ]


def test_covered_counts_every_moment_once() -> None:
    generator = random.Random(0)
    for count in (0, 1, 2, 5, 20) * 20:
        starts = [generator.randrange(-50, 50) for _ in range(count)]
        spans = [(start, start + generator.randrange(12)) for start in starts]
        moments = {moment for start, end in spans for moment in range(start, end)}
        assert covered(spans) == len(moments)


class Event(NamedTuple):
    """As libkineto records it."""

    label: str
    kind: str
    start: int
    end: int

    def name(self) -> str:
        return self.label

    def activity_type(self) -> str:
        return self.kind

    def start_ns(self) -> int:
        return self.start * 10**9

    def end_ns(self) -> int:
        return self.end * 10**9


def test_communication_on_a_device_is_that_of_its_kernels() -> None:
    events = [
        Event("nccl:all_reduce", "gpu_user_annotation", 0, 50),
        Event("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)", "kernel", 10, 14),
        Event("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgs)", "kernel", 12, 18),
        Event("_power_fwd_state_kernel", "kernel", 5, 11),
        Event("Memcpy DtoH (Device -> Pinned)", "gpu_memcpy", 15, 16),
        Event("Optimizer.step#AdamW.step", "gpu_user_annotation", 0, 50),
    ]
    assert communication(events) == Communication(total=8, exposed=8 - 1 - 1)
    assert communication(events[3:]) == Communication(0, 0)
    assert all(map(math.isnan, communication([])))


def test_a_rank_that_stays_slow_is_named_now_and_then(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    report = StragglerReport(tmp_path / "ranks.jsonl", ["a", "b", "c"])

    def add(step: int, *exposed: float) -> dict[str, float]:
        return report.add(
            step, [1.8] * 3, [Communication(1.5, one) for one in exposed], [0.2] * 3, [1e9] * 3
        )

    with caplog.at_level(logging.WARNING):
        values = add(5, 0.6, 0.9, 0.8)  # work 1.2, 0.9, 1.0
        assert values["train/slowest_rank"] == 0
        assert math.isclose(values["train/slowest_over_median_work"], 1.2)
        assert values["train/exposed_communication_seconds"] == 0.8
        add(6, 0.2, 0.8, 0.8)  # work 1.6, 1.0, 1.0, once
        assert not caplog.messages
        for step in range(100, 1500, 100):
            add(step, 0.8, 0.3, 0.8)  # work 1.0, 1.5, 1.0
        for step in (1500, 1600):
            add(step, 0.2, 0.8, 0.8)
    told = [re.findall(r"rank (\d) on (\w) .* of step (\d+)", one)[0] for one in caplog.messages]
    assert told == [("1", "b", "200"), ("1", "b", "1200"), ("0", "a", "1600")]
    lines = (tmp_path / "ranks.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [5, 6, *range(100, 1700, 100)]
    assert json.loads(lines[0])["work"] == [1.2, 0.9, 1.0]


def test_a_report_whose_place_a_fifo_takes_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    os.mkfifo(tmp_path / "ranks.jsonl")
    report = StragglerReport(tmp_path / "ranks.jsonl", ["a"])
    report.add(1, [1.0], [Communication(0.5, 0.5)], [0.0], [1.0])
    (message,) = caplog.messages
    assert "ranks.jsonl could not be written: " in message
