"""An array of jobs prepares the data that one machine prepares, whatever is killed meanwhile."""

import json
import random
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from longhaul.pipeline.cli import main

Cluster = Any  # conftest.Cluster: modules of tests cannot import each other
Work = Any

SMALL_UNITS = """
import sys
if "prepare" in sys.orig_argv:
    import longhaul.datamodules.preparation.text as text
    text.UNIT_BYTES = 100_000
"""
OPTIONS = ("--doc-tokens", "2048", "--docs-per-shard", "20", "--workers", "2")
TASKS = 4


def write_texts(path: Path, count: int) -> None:
    draw = random.Random(0)
    words = [f"word{number}" for number in range(5000)]
    texts = (" ".join(draw.choices(words, k=draw.randint(0, 800))) for _ in range(count))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def running(destination: str) -> list[psutil.Process]:
    """The processes of jobs that prepare into this folder, and their workers."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if "prepare" in line and destination in line and "longhaul.pipeline.cli" in line:
            if line[0].endswith("srun"):
                continue
            found.append(process)
            try:
                found += process.children()
            except psutil.NoSuchProcess:
                continue
    return found


def prepared_by_jobs(
    work: Work, tokenizer: str, destination: str, disturb: Callable[[list[str]], None]
) -> dict[str, bytes]:
    """What the array has written; `disturb` is called with the jobs until both have ended."""
    words = ("--prepare", "text", "a.jsonl", destination, "--tokenizer", tokenizer, *OPTIONS)
    before = len(work.jobs()) if work.folder.exists() else 0
    work.submit("slurm.max_restarts=1000", "--tasks", str(TASKS), *words)
    jobs = work.jobs()[before:]
    assert len(jobs) == 2
    deadline = time.monotonic() + 1200
    while (state := work.cluster.job(jobs[1])["JobState"]) != "COMPLETED":
        assert state in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"), work.said(jobs[1])
        assert time.monotonic() < deadline
        disturb(jobs)
    return contents(work.path / destination)


def prepared_here(work: Work, tokenizer: str) -> dict[str, bytes]:
    words = ("a.jsonl", "here", "--tokenizer", tokenizer, *OPTIONS)
    assert main(["prepare", "text", *words]) == 0
    return contents(work.path / "here")


@pytest.mark.wide
def test_an_array_prepares_what_one_machine_prepares(
    work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(work.cluster.environment, "LONGHAUL_TEST_FAULT", SMALL_UNITS)
    monkeypatch.chdir(work.path)
    write_texts(work.path / "a.jsonl", 200)
    array = prepared_by_jobs(work, "bytes", "array", lambda jobs: time.sleep(0.2))
    assert array == prepared_here(work, "bytes")
    said = "".join(log.read_text() for log in work.folder.glob("logs/job-*.log"))
    assert all(f"array: part {index} of {TASKS} is tokenized" in said for index in range(TASKS))


@pytest.mark.soak
def test_a_hundred_kills_and_requeues_of_tasks_change_no_byte(
    work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(work.cluster.environment, "LONGHAUL_TEST_FAULT", SMALL_UNITS)
    monkeypatch.chdir(work.path)
    write_texts(work.path / "a.jsonl", 3000)
    expected = prepared_here(work, "gpt2")
    draw = random.Random(0)
    kills = {"task": 0, "worker": 0, "requeue": 0}
    finished = 0
    while sum(kills.values()) < 100:
        destination = f"array{finished}"

        def disturb(jobs: list[str], destination: str = destination) -> None:
            time.sleep(draw.uniform(0.1, 2))
            if sum(kills.values()) >= 100:
                return  # a slow machine might never finish between two kills
            if draw.random() < 0.15:
                task = f"{jobs[0]}_{draw.randrange(TASKS)}"
                command = ("scontrol", "requeue", task)
                done: subprocess.CompletedProcess[str] = work.cluster.run(*command, check=False)
                kills["requeue"] += done.returncode == 0
            elif processes := running(destination):
                process = draw.choice(processes)
                try:
                    is_task = "longhaul.pipeline.cli" in process.cmdline()
                    process.kill()
                    kills["task" if is_task else "worker"] += 1
                except psutil.NoSuchProcess:
                    pass

        assert prepared_by_jobs(work, "gpt2", destination, disturb) == expected
        finished += 1
    print(f"{kills} in {finished} preparations")


def test_what_cannot_be_divided_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for words, message in (
        (
            ["longcrawl64", "a.zarr", "out"],
            "--prepare: found longcrawl64, wanted text or",
        ),
        (["text", "nowhere", "out"], "nowhere: no such file or folder"),
        (["text", "stdlib", "out", "--part", "0/2"], "--prepare: found --part, wanted --tasks"),
        (["text", "stdlib"], "found one path, 'stdlib', wanted sources and then the folder"),
        (["text", "stdlib", "out", "--doc-tokens", "0"], "--doc-tokens: found 0, wanted 1 or more"),
    ):
        assert main(["submit", "run/demo.yaml", "--dry-run", "--prepare", *words]) == 2
        assert capsys.readouterr().err.startswith(f"longhaul: {message}")
    assert main(["submit", "run/demo.yaml", "--dry-run", "--prepare", "text", "stdlib", "out"]) == 0
    array, pack = capsys.readouterr().out.split("#!/bin/bash\n")[1:]
    assert "#SBATCH --array=0-7%4\n" in array
    assert "--array" not in pack.partition("# -- settings end")[0]
    assert all("\nset -- text stdlib out\n" in script for script in (array, pack))
    assert not list(tmp_path.iterdir())
