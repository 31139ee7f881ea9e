"""`longhaul verify` on a machine without a GPU: what it runs, what it skips, what it says."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pretended_checks as pretended
import pytest

from longhaul.kernels.power.verify.benchmark import Task
from longhaul.kernels.power.verify.catalogue import feature_cases
from longhaul.pipeline import cli
from longhaul.pipeline.verification import kernels, plan, run, trainer
from longhaul.pipeline.verification.check import Check, Place
from longhaul.pipeline.verification.machine import Machine, find_machine
from longhaul.pipeline.verification.models import faults_of
from longhaul.pipeline.verification.record import read_record
from longhaul.pipeline.verification.run import run_checks
from longhaul.pipeline.verification.timings import targets

CPU = Machine(device="cpu", name="Xeon", cores=1)


def test_without_a_gpu_it_checks_what_it_can_and_says_what_it_could_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    every = plan.all_checks(CPU)
    runnable = {one.key for one in kernels.headline_checks("cpu")}
    checks = [one for one in every if one.needs.gpu or one.key in runnable]
    path = tmp_path / "verify.json"
    assert run_checks(path, CPU, checks, targets, time.monotonic() + 600) == 0
    results = read_record(path)["results"]
    for key in runnable:
        assert results[key]["status"] == "passed"
        assert set(results[key]["result"]["forms"]) == {"chunked", "attention"}
    skipped = [key for key, one in results.items() if one["status"] == "skipped"]
    assert len(skipped) == len(checks) - len(runnable)
    printed = capsys.readouterr().out
    assert f"skipped, needs a GPU: {len(skipped)} checks, such as timings: training" in printed


@pytest.mark.wide
def test_bad_arguments_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for minutes in ("5", "nan"):
        assert cli.main(["verify", "--minutes", minutes]) == 2
        assert f"--minutes: found {minutes}, wanted 6 or more, for the" in capsys.readouterr().err
    assert cli.main(["verify", "--json", "no/verify.json"]) == 2
    assert "--json: found no folder no, wanted one" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_gpu_that_ends_the_process_that_asks_for_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "find_machine", pretended.ends)
    assert cli.main(["verify", "--json", str(tmp_path / "verify.json")]) == 1
    error = capsys.readouterr().err
    assert "verify: found no answer from torch about the devices, its process ended" in error


def test_the_machine_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    found = find_machine()
    assert {"python", "torch"} <= set(found.versions)
    assert len(found.code) == 64
    assert find_machine() == found


def test_other_launchers_do_not_reach_the_trainings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_NTASKS", "WORLD_SIZE", "RANK", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    environment = trainer._environment()
    assert not {"SLURM_NTASKS", "WORLD_SIZE", "RANK", "MASTER_PORT"} & set(environment)
    assert environment["PYTHONSAFEPATH"] == "1"


def test_losses_that_differ_from_one_device_are_a_fault() -> None:
    assert trainer._unlike([5.0, 4.0], [5.0, 4.0], "32-true") == []
    (fault,) = trainer._unlike([5.0, 4.5], [5.0, 4.0], "bf16-mixed")
    assert fault == "loss of update 2: found 4.5, wanted 4.0 as on one device"
    half_of_the_samples = [5.5696, 5.3328], [5.5983, 5.3000]
    assert trainer._unlike(*half_of_the_samples, "bf16-mixed")
    assert trainer._unlike([5.0], [5.0, 4.0], "32-true") == ["updates: found 1, wanted 2"]
    assert trainer._unlike([5.0, float("nan")], [5.0, 4.0], "32-true")
    assert faults_of([5.0, 4.0]) == []
    for losses in ([], [4.0, 5.0], [5.0, float("nan")]):
        assert faults_of(losses)


# It keeps what it is asked to run, and has a status of its own for what it finds there.
SANITIZER = """#!/bin/sh
for one in "$@"; do case $one in --error-exitcode=*) found=${one#*=} ;; esac; done
echo "$PYTORCH_NO_CUDA_MEMORY_CACHING $one" > asked
"""


@pytest.mark.parametrize(
    ("ending", "faults"),
    [
        ("echo '========= ERROR SUMMARY: 0 errors'", []),
        (
            "echo '========= Invalid __global__ read of size 4 bytes'; exit $found",
            ["compute-sanitizer ended with 86: ========= Invalid __global__ read of size 4 bytes"],
        ),
        ("echo 'No such case' >&2; exit 1", ["compute-sanitizer ended with 1: No such case"]),
        ("echo 'Error: Device not supported'; exit 1", []),
    ],
)
def test_what_a_sanitizer_finds_is_a_fault(
    ending: str, faults: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "compute-sanitizer"
    program.write_text(SANITIZER + ending)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    checks = [one for one in kernels.remaining_checks("cuda") if "out of bounds" in one.name]
    assert len(checks) == 2
    cases = {case.name for case in feature_cases("bfloat16")}
    for check in checks:
        result = check.function(check.argument, Place("cuda", tmp_path))
        assert result["faults"] == faults
        assert ("not_supported" in result) == ("not supported" in ending)
        asked, _, name = (tmp_path / "asked").read_text().strip().partition(" ")
        assert (asked, name) == ("1", check.argument)
        assert name in cases


def test_what_peers_cannot_do_is_no_failure_of_ours() -> None:
    by_ours: dict[bool, set[str]] = {True: set(), False: set()}
    for one in plan.all_checks(CPU):
        if isinstance(one.argument, Task):
            by_ours[one.is_ours].add(one.argument.implementation.partition(",")[0])
    assert by_ours[True] == {"longhaul", "torch"}
    assert by_ours[False] == {"sdpa flash", "sdpa cudnn", "chunk_simple_gla", "retention"}


@pytest.mark.wide
def test_the_trainer_passes_its_checks_on_a_cpu(tmp_path: Path) -> None:
    wanted = (
        "train: single, bf16-mixed", "resume: to the bit", "evaluate: 2", "generate",
        "muon: single and fsdp on 2",
        "train: ddp on 2 ranks, bf16-mixed", "train: fsdp on 2 ranks, bf16-mixed",
        "train: deepspeed 3 on 2 ranks, bf16-mixed",
        "train: context parallel on 2 ranks, bf16-mixed",
    )  # fmt: skip
    checks: list[Check] = [
        replace(one, seconds=600)
        for one in [*trainer.first_checks(), *trainer.remaining_checks(CPU)]
        if one.name.startswith(wanted)
    ]
    assert len(checks) == len(wanted)
    path = tmp_path / "verify.json"
    status = run_checks(path, CPU, checks, lambda results: [], time.monotonic() + 3000)
    results = read_record(path)["results"]
    assert status == 0, {key: one["faults"] for key, one in results.items()}


def test_sigterm_ends_it_like_an_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(run, "_machine", lambda: CPU)
    monkeypatch.setattr(run, "run_checks", lambda *_: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(SystemExit) as ended:
        run.verify(tmp_path / "verify.json", None)
    assert ended.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before
