"""What `longhaul status` says of runs, without a Slurm."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from longhaul.pipeline.cli import main

COLUMNS = ["name", "job", "state", "step", "loss", "validation", "tokens/s", "left", "restarts"]
COLUMNS += ["checkpoint"]


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.fixture
def status(capsys: pytest.CaptureFixture[str]) -> Any:
    """The rows that `longhaul status ROOT...` prints, by the runs' names."""

    def show(*roots: Path | str) -> dict[str, dict[str, str]]:
        capsys.readouterr()
        assert main(["status", *map(str, roots)]) == 0
        lines = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
        cells = [[cell.strip() for cell in line if cell.strip()] for line in lines]
        assert cells[0] == COLUMNS
        return {row[0]: dict(zip(COLUMNS, row, strict=True)) for row in cells[1:]}

    return show


def _make(folder: Path, *lines: dict[str, Any]) -> Path:
    """A run of 100 updates of 1,000 tokens with a journal."""
    (folder / "logs").mkdir(parents=True)
    (folder / "config.yaml").write_text(
        "{optim: {tokens_per_update: 1000}, trainer: {max_tokens: 99001}}"
    )
    if lines:
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / "logs" / "metrics.jsonl").write_text(text)
    return folder


def _update(step: int, rate: float = 500.0) -> dict[str, Any]:
    values = {"curves/train_loss": 3.0 - step / 100, "train/tokens_per_second": rate}
    return {"kind": "train", "step": step, "time_ms": step, "values": values}


def _status(status: str) -> dict[str, Any]:
    return {"kind": "status", "number": 1, "time_ms": 1, "status": status}


def test_a_finished_run_shows_its_end(uninterrupted: Any, status: Any) -> None:
    journal = (uninterrupted.path / "small" / "logs" / "metrics.jsonl").read_text()
    lines = [*map(json.loads, journal.splitlines())]
    losses = [line for line in lines if line["kind"] == "train"]
    (*_, validation) = [line for line in lines if line["kind"] == "validation"]
    row = status(uninterrupted.path)["small"]
    assert (row["state"], row["step"], row["left"]) == ("finished", "30/30", "-")
    assert row["loss"] == f"{losses[-1]['values']['curves/train_loss']:.4f}"
    assert row["validation"] == f"{validation['values']['curves/validation_loss']:.4f}"
    assert row["checkpoint"].startswith("30, ")
    assert status(uninterrupted.path / "small")["small"] == row


def test_sources_have_rows_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = {"train/loss/web": 2.0, "train/tokens/web": 9000, "train/epochs/web": 0.25}
    update = _update(2)
    update["values"] |= values | {"train/tokens/code": 1000, "train/epochs/code": 1.5}
    first = _update(1)
    first["values"] |= {"train/loss/web": 3.0, "train/loss/code": 2.5}  # code has none later
    validation = {"kind": "validation", "step": 2, "time_ms": 2, "values": {}}
    validation["values"] = {"validation/loss/code": 1.25}
    folder = _make(tmp_path / "a", first, update, validation)
    text = (folder / "config.yaml").read_text().strip()
    sources = "data: {sources: {web: {weight: 1}, code: {weight: 2}}}"
    (folder / "config.yaml").write_text(f"{text[:-1]}, {sources}}}\n")
    assert main(["status", str(tmp_path)]) == 0
    rows = capsys.readouterr().out.partition("\n\n")[2].splitlines()
    assert [row.split() for row in rows] == [
        ["name", "source", "loss", "validation", "tokens", "epochs"],
        ["a", "web", "2.0000", "-", "9,000", "0.25"],
        ["a", "code", "2.5000", "1.2500", "1,000", "1.5"],
    ]


def test_running_stopped_and_killed_are_told_apart(make_run: Any, status: Any) -> None:
    run = make_run(2000)
    running = run.start("train", "small.yaml")
    run.wait_for_step(running, 8)
    row = status(run.path)["small"]
    assert row["state"] == "running"
    assert row["step"].endswith("/2,000")
    assert row["left"] != "-"
    running.send_signal(signal.SIGTERM)
    assert running.wait() == 75
    assert status(run.path)["small"]["state"] == "stopped"
    again = run.start("train", "small.yaml")
    run.wait_for_step(again, run.last_step + 2)
    os.killpg(again.pid, signal.SIGKILL)
    again.end()
    row = status(run.path)["small"]
    assert (row["state"], row["left"]) == ("died", "-")


def test_speed_is_the_median_and_time_left_follows_from_it(
    tmp_path: Path, status: Any, fork: Any
) -> None:
    slow = [_update(step, 10.0) for step in range(1, 5)]
    run = _make(tmp_path / "run", *slow, *(_update(step) for step in range(5, 41)))
    code = (
        "import sys, time; from pathlib import Path\n"
        "from longhaul.pipeline.tracking.metrics_journal import Journal\n"
        "journal = Journal(Path('logs/metrics.jsonl')); Path('up').touch(); time.sleep(60)"
    )
    holder = fork(code, run)
    try:
        while not (run / "up").exists():
            assert holder.poll() is None
        row = status(tmp_path)["run"]
    finally:
        os.killpg(holder.pid, signal.SIGKILL)
        holder.wait()
    # 60 updates of 1,000 tokens at 500 a second.
    assert row | {"restarts": "", "checkpoint": ""} == {
        "name": "run",
        "job": "-",
        "state": "running",
        "step": "40/100",
        "loss": "2.6000",
        "validation": "-",
        "tokens/s": "500",
        "left": "0:02:00",
        "restarts": "",
        "checkpoint": "",
    }


def test_a_value_that_a_journal_lacks_is_a_dash(tmp_path: Path, status: Any) -> None:
    bare: dict[str, Any] = {"step": 7, "time_ms": 7, "values": {"train/loss": 2.0}}
    lines = [_update(6), bare | {"kind": "train"}, bare | {"kind": "validation"}]
    _make(tmp_path / "older", *lines, _status("FINISHED"))
    _make(tmp_path / "oldest", *lines[1:], _status("FINISHED"))
    rows = status(tmp_path)
    found = [[rows[name][key] for key in COLUMNS[2:7]] for name in ("older", "oldest")]
    assert found == [
        ["finished", "7/100", "-", "-", "500"],
        ["finished", "7/100", "-", "-", "-"],
    ]


def test_of_a_long_journal_only_the_end_is_read(tmp_path: Path, status: Any) -> None:
    run = _make(tmp_path / "run", _update(1))
    journal = run / "logs" / "metrics.jsonl"
    os.truncate(journal, 1 << 40)  # no memory holds it
    with journal.open("a") as file:
        lines = [_update(7), _update(8), _status("FAILED")]
        file.write("\n" + "".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "tr')
    row = status(tmp_path)["run"]
    assert (row["state"], row["step"]) == ("failed", "8/100")


def test_a_run_that_never_began_or_is_damaged_leaves_the_others(
    tmp_path: Path, status: Any
) -> None:
    _make(tmp_path / "a")
    _make(tmp_path / "b", _update(3), _status("KILLED"))
    (_make(tmp_path / "c") / "config.yaml").write_text("{optim: [")
    (tmp_path / "d" / "slurm").mkdir(parents=True)
    (tmp_path / "d" / "slurm" / "jobs.jsonl").write_text('{"job_id": "1", "kind": "train"}\n')
    (tmp_path / "no-run").mkdir()
    (_make(tmp_path / "e", _update(3)) / "DONE").write_text("not json")
    (_make(tmp_path / "f") / "DONE").write_text('{"step": 99, "tokens": 99, "is_tracked": true}')
    (_make(tmp_path / "g") / "DONE").write_text('{"step": 0, "tokens": 64, "is_tracked": true}')
    rows = status(tmp_path)
    assert [rows[name]["state"] for name in "abd"] == ["not started", "stopped", "not started"]
    assert rows["c"]["state"].startswith("cannot be read")
    assert rows.keys() == set("abcdefg")
    told = [(rows[name]["state"], rows[name]["step"]) for name in "efg"]
    assert told == [("DONE is damaged", "3/100"), ("finished", "99/100"), ("imported", "-")]
    assert (rows["d"]["job"], rows["d"]["restarts"]) == ("1", "-")


def test_a_folder_that_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", str(tmp_path / "nowhere")]) == 2
    assert "nowhere: found no such folder" in capsys.readouterr().err
    assert main(["status", str(tmp_path)]) == 0
    assert "no runs in" in capsys.readouterr().out


@pytest.fixture
def squeue(tmp_path: Path) -> Any:
    """A squeue that answers with these states of jobs, or fails; its calls are in squeue.calls."""

    def answer(states: dict[str, str] | None) -> None:
        lines = [f"{job:<64}{state:<32}0  Why not" for job, state in (states or {}).items()]
        (tmp_path / "squeue.answer").write_text("".join(f"{line}  \n" for line in lines))
        end = "exit 0" if states is not None else 'echo "Unable to contact" >&2; exit 1'
        name = tmp_path / "squeue"
        text = f'#!/bin/sh\necho "$@" >>{name}.calls\n/bin/cat {name}.answer\n{end}\n'
        name.write_text(text)
        (tmp_path / "squeue").chmod(0o755)

    return answer


def _submit(folder: Path, *jobs: str) -> Path:
    (folder / "slurm").mkdir(parents=True, exist_ok=True)
    lines = [{"job_id": job, "kind": "train"} for job in jobs]
    lines.append({"job_id": "900", "kind": "evaluate"})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "slurm" / "jobs.jsonl").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("states", "job", "state"),
    [
        (["RUNNING", "PENDING", "PENDING"], "11", "running"),
        (["COMPLETING", "PENDING", "PENDING"], "11", "completing"),
        (["TIMEOUT", "CONFIGURING", "PENDING"], "12", "configuring"),
        (["TIMEOUT", "STOPPED", "PENDING"], "12", "stopped"),
        (["NODE_FAIL", "PENDING", "PENDING"], "12", "pending, Why not"),
        (["TIMEOUT", "NODE_FAIL", "DEADLINE"], "13", "deadline"),
        ([], "13", "died"),
    ],
)
def test_of_a_chain_the_job_that_runs_or_the_next_or_the_last_is_shown(
    tmp_path: Path, status: Any, squeue: Any, states: list[str], job: str, state: str
) -> None:
    _submit(_make(tmp_path / "run", _update(3)), "11", "12", "13")
    squeue(dict(zip(("11", "12", "13"), states, strict=False)))
    row = status(tmp_path)["run"]
    assert (row["job"], row["state"]) == (job, state)
    assert row["restarts"] == ("0" if states else "-")


def test_slurm_is_asked_once_for_all_runs(tmp_path: Path, status: Any, squeue: Any) -> None:
    for job in ("11", "12", "13_1"):
        _submit(_make(tmp_path / f"run{job}"), job)
    squeue({"11": "RUNNING", "13_1": "RUNNING"})
    rows = status(tmp_path)
    states = [rows[f"run{job}"]["state"] for job in ("11", "12", "13_1")]
    assert states == ["running", "not started", "running"]
    (call,) = (tmp_path / "squeue.calls").read_text().splitlines()
    assert "--jobs=11,12,13_1 " in call


def test_that_slurm_does_not_answer_is_said(
    tmp_path: Path, squeue: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    _submit(_make(tmp_path / "run", _update(3)), "11")
    squeue(None)
    assert main(["status", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert "died" in said.out
    assert "Slurm does not answer" in said.err
    squeue({})
    assert main(["status", str(tmp_path)]) == 0
    assert capsys.readouterr().err == ""


def test_runs_of_one_experiment_are_shown_begun_or_not(
    tmp_path: Path, status: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("ours", "other", "damaged"):
        config = _make(tmp_path / name) / "config.yaml"
        text = config.read_text().removesuffix("}")
        config.write_text(f"{text}, tracking: {{experiment: {name}}}}}")
    (tmp_path / "damaged" / "config.yaml").write_text("{optim: [")
    queued = _submit(tmp_path / "queued", "11") / "slurm" / "config.yaml"
    queued.write_text((tmp_path / "ours" / "config.yaml").read_text())
    rows = status(tmp_path, "--experiment", "ours")
    assert rows.keys() == {"ours", "queued"}
    assert rows["queued"]["step"] == "0/100"
    assert main(["status", str(tmp_path), "--experiment", "none"]) == 0
    assert "no runs of experiment none in" in capsys.readouterr().out
