import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from longhaul.pipeline.tracking import metrics_journal as journal_module
from longhaul.pipeline.tracking.metrics_journal import (
    Journal,
    JournalError,
    parse_line,
    read_lines,
)


def _path(folder: Path) -> Path:
    return folder / "logs" / "metrics.jsonl"


def _reopen(journal: Journal) -> Journal:
    journal.close()
    return Journal(journal.path)


def test_lines_read_back_exactly_and_are_strict_json(tmp_path: Path) -> None:
    journal = Journal(_path(tmp_path))
    values = {"a": 0.1 + 0.2, "b": 1e-320, "c": math.nan, "d": math.inf, "e": -math.inf, "f": 3.0}
    journal.append("train", 1, values)
    (line,), _ = read_lines(journal.path)
    assert (line["kind"], line["step"]) == ("train", 1)
    back = {name: float(value) for name, value in line["values"].items()}
    assert math.isnan(back.pop("c"))
    del values["c"]
    assert back == values

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    json.loads(journal.path.read_text(), parse_constant=refuse)


def test_a_step_that_was_journaled_is_not_journaled_again(tmp_path: Path) -> None:
    journal = Journal(_path(tmp_path))
    assert journal.append("train", 0, {"x": 0.0})
    assert journal.append("train", 5, {"x": 5.0})
    assert journal.append("validation", 5, {"y": 5.0})
    journal = _reopen(journal)
    assert not journal.append("train", 0, {"x": -1.0})
    assert not journal.append("train", 4, {"x": -1.0})
    assert not journal.append("train", 5, {"x": -1.0})
    assert not journal.append("validation", 5, {"y": -1.0})
    assert journal.append("train", 6, {"x": 6.0})
    lines, _ = read_lines(journal.path)
    assert [(line["kind"], line["step"], line["values"]) for line in lines] == [
        ("train", 0, {"x": 0.0}),
        ("train", 5, {"x": 5.0}),
        ("validation", 5, {"y": 5.0}),
        ("train", 6, {"x": 6.0}),
    ]


def test_events_are_numbered_within_their_kind_across_reopening(tmp_path: Path) -> None:
    journal = Journal(_path(tmp_path))
    assert journal.add("status", status="RUNNING") == 1
    assert journal.add("artifact", path="a", folder="") == 1
    journal = _reopen(journal)
    assert journal.add("status", status="FINISHED") == 2
    last = journal.last("status")
    assert last is not None
    assert last["status"] == "FINISHED"


def test_a_torn_last_line_is_cut_off_wherever_it_was_torn(tmp_path: Path) -> None:
    journal = Journal(_path(tmp_path))
    journal.append("train", 1, {"x": 1.0})
    whole = journal.path.read_bytes()
    journal.append("train", 2, {"x": 2.0})
    both = journal.path.read_bytes()
    journal.close()
    for end in range(len(whole), len(both)):
        journal.path.write_bytes(both[:end])
        reopened = Journal(journal.path)
        assert journal.path.read_bytes() == whole
        assert reopened.append("train", 2, {"x": 2.0})
        reopened.close()
        assert len(read_lines(journal.path)[0]) == 2
    journal.path.write_bytes(b"x" * 200_000)
    Journal(journal.path).close()
    assert journal.path.read_bytes() == b""


DAMAGES: list[dict[str, Any]] = [
    {"step": "3"},
    {"step": -1},
    {"step": 10**30},
    {"time_ms": 1.5},
    {"kind": "../x"},
    {"values": [1.0]},
    {"values": {"x": "much"}},
    {"values": None},
    {"kind": "status", "number": 1, "status": "FINE"},
    {"kind": "params", "number": 1, "values": {"a": 1}},
    {"kind": "artifact", "number": 1, "path": None},
    {"kind": "checkpoint", "number": 1, "path": 3},
]


def test_a_damaged_line_in_the_middle_is_skipped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(_path(tmp_path))
    journal.append("train", 1, {"x": 1.0})
    journal.close()
    with journal.path.open("ab") as file:
        file.write(b'{"kind": "tra\x00\n[]\n{"step": 3}\n' + b"[" * 9000 + b"\n")
        for change in DAMAGES:
            line = {"kind": "train", "step": 3, "time_ms": 1, "values": {"x": 1.0}, **change}
            file.write(
                json.dumps({k: v for k, v in line.items() if v is not None}).encode() + b"\n"
            )
    journal = Journal(journal.path)
    assert len(caplog.messages) == 4 + len(DAMAGES)
    journal.append("train", 2, {"x": 2.0})
    lines, _ = read_lines(journal.path)
    assert [line["step"] for line in lines] == [1, 2]


def test_reading_in_parts_gives_every_line_once_and_leaves_an_unfinished_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(_path(tmp_path))
    for step in range(20):
        journal.append("train", step, {"x": 1.0})
    with journal.path.open("ab") as file:
        file.write(b'{"kind"')
    for size in (1, 50, 64, 200):
        monkeypatch.setattr(journal_module, "_READ_BYTES", size)
        steps, offset, end = [], -1, 0
        while offset != end:
            offset = end
            lines, end = read_lines(journal.path, offset)
            steps += [line["step"] for line in lines]
        assert steps == list(range(20))
        assert end == journal.path.stat().st_size - len(b'{"kind"')


WORKER_OUTLIVES = """
import os, sys, time
from pathlib import Path
from longhaul.pipeline.tracking.metrics_journal import Journal

journal = Journal(Path(sys.argv[1]))
if os.fork() == 0:
    os.close(1)  # as a data loading worker does: it lives on for a while
    time.sleep(30)
    os._exit(0)
print(os.getpid(), flush=True)
time.sleep(30)
"""


def test_one_process_writes_at_a_time_and_a_killed_one_holds_nothing(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER_OUTLIVES, str(_path(tmp_path))],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(JournalError, match=f"by another process.*pid {process.pid} on"):
            Journal(_path(tmp_path))
        process.kill()
        process.wait()
        assert Journal(_path(tmp_path)).append("train", 1, {})
    finally:
        os.killpg(process.pid, signal.SIGKILL)


HOLDER = """
import sys, time
from pathlib import Path
from longhaul.pipeline.tracking.metrics_journal import Journal

journal = Journal(Path(sys.argv[1]))
print(flush=True)
time.sleep(float(sys.argv[2]))
"""


@pytest.fixture
def hold(tmp_path: Path) -> Iterator[Callable[[float], None]]:
    """Another process that holds the journal for so many seconds."""
    processes = []

    def start(seconds: float) -> None:
        command = [sys.executable, "-c", HOLDER, str(_path(tmp_path)), str(seconds)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=tmp_path)
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline()

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_a_job_that_was_queued_again_waits_for_the_lock_and_says_so_once(
    tmp_path: Path,
    hold: Callable[[float], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    hold(1.5)
    assert Journal(_path(tmp_path)).append("train", 1, {})
    (message,) = caplog.messages
    assert "being written by another process" in message


def test_the_wait_for_a_lock_has_an_end_and_a_first_start_has_none(
    tmp_path: Path, hold: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    hold(60)
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it waits"))
    with pytest.raises(JournalError, match="by another process"):
        Journal(_path(tmp_path))
    monkeypatch.undo()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    monkeypatch.setattr(journal_module, "LOCK_AGAIN_S", 0.5)
    with pytest.raises(JournalError, match="by another process"):
        Journal(_path(tmp_path))


FULL_DISK = """
import resource, sys
from pathlib import Path
from longhaul.pipeline.tracking.metrics_journal import Journal, JournalError

journal = Journal(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
try:
    for step in range(100):
        journal.append("train", step, {"loss": 1.0})
except JournalError as error:
    print(step, error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
journal.append("train", step, {"loss": 2.0})
"""


def test_a_full_disk_is_one_clear_line_and_leaves_no_half_line(tmp_path: Path) -> None:
    path = _path(tmp_path)
    result = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(path)], capture_output=True, text=True, cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    step, message = result.stdout.split(maxsplit=1)
    assert f"{path} cannot be written: File too large" in message
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(int(step) + 1))
    assert lines[-1]["values"] == {"loss": 2.0}


def test_a_journal_that_cannot_be_made_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("not a folder")
    with pytest.raises(JournalError, match=r"metrics\.jsonl cannot be opened"):
        Journal(_path(tmp_path))


def test_a_journal_is_not_written_after_it_was_closed(tmp_path: Path) -> None:
    journal = Journal(_path(tmp_path))
    journal.close()
    journal.close()
    journal.sync()
    with pytest.raises(JournalError, match="closed"):
        journal.append("train", 1, {})


def test_a_kind_is_a_plain_word(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="kind: found 'a@b', wanted"):
        Journal(_path(tmp_path)).append("a@b", 1, {})


@pytest.mark.parametrize("name", ["evaluation.jsonl", "evaluation.jsonl.lock"])
@pytest.mark.parametrize("form", ["link", "link to nothing", "FIFO", "folder"])
def test_nothing_but_a_file_is_written_in_the_place_of_a_journal(
    tmp_path: Path, name: str, form: str
) -> None:
    (tmp_path / "precious").write_text("no line")
    logs = tmp_path / "run" / "logs"
    logs.mkdir(parents=True)
    if form == "FIFO":
        os.mkfifo(logs / name)
    elif form == "folder":
        (logs / name).mkdir()
    else:
        (logs / name).symlink_to(tmp_path / ("precious" if form == "link" else "new"))
    with pytest.raises(JournalError, match=r"evaluation\.jsonl"):
        Journal(logs / "evaluation.jsonl")
    assert (tmp_path / "precious").read_text() == "no line"
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", "", "a'b", "a\x1b", "a\0"])
def test_a_line_that_names_what_lies_outside_the_run_is_damaged(path: str) -> None:
    for event in ({"kind": "artifact", "folder": ""}, {"kind": "checkpoint", "step": 1}):
        line = {**event, "number": 1, "time_ms": 1, "values": {}, "path": path}
        with pytest.raises(ValueError, match=r"a line: path: found .* wanted a path"):
            parse_line(json.dumps(line).encode())


@pytest.mark.parametrize(
    "replace", [Path.touch, os.mkfifo, lambda path: path.symlink_to("nowhere"), lambda path: None]
)
def test_a_journal_that_is_replaced_while_it_is_written_is_written_again(
    tmp_path: Path, replace: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(_path(tmp_path))
    journal.append("train", 1, {"x": 1.0})
    journal.path.unlink()
    replace(journal.path)
    journal.append("train", 2, {"x": 2.0})
    assert [line["step"] for line in journal.read()[0]] == [1, 2]
    journal.sync()
    journal.append("train", 3, {"x": 3.0})
    journal.close()
    assert [line["step"] for line in read_lines(journal.path)[0]] == [1, 2, 3]
    assert caplog.messages == [f"{journal.path} was removed or replaced; it is written again"]


def test_a_journal_whose_place_a_folder_takes_is_told_of_once_and_written_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(_path(tmp_path))
    journal.path.unlink()
    journal.path.mkdir()
    for step in (1, 2):
        journal.append("train", step, {"x": 1.0})
        journal.sync()
    (message,) = caplog.messages
    assert message.endswith("metrics.jsonl cannot be written: Is a directory")
    journal.path.rmdir()
    journal.close()
    assert [line["step"] for line in read_lines(journal.path)[0]] == [1, 2]


LOCKED = """
import sys
from pathlib import Path
from longhaul.pipeline.tracking.metrics_journal import Journal, JournalError
try:
    Journal(Path(sys.argv[1]))
except JournalError as error:
    print(error)
else:
    print("open")
    sys.stdin.read()
"""


def test_a_lock_that_is_removed_is_taken_again_unless_another_has_it(tmp_path: Path) -> None:
    journal = Journal(_path(tmp_path))
    lock = journal.path.with_name("metrics.jsonl.lock")

    def other() -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", LOCKED, str(journal.path)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    lock.unlink()
    journal.sync()
    with other() as process:
        assert f"another process (pid {os.getpid()}" in process.communicate()[0]
    lock.unlink()
    with other() as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        with pytest.raises(JournalError, match=rf"another process \(pid {process.pid} "):
            journal.sync()
        process.communicate()
