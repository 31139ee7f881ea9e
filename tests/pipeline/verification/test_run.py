"""A pretended GPU: all checks in the promised order, in pieces, whatever becomes of one of them."""

import json
import os
import pickle
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pretended_checks as pretended
import pytest

from longhaul.pipeline.verification import run as running
from longhaul.pipeline.verification.check import Check, Needs
from longhaul.pipeline.verification.machine import Machine
from longhaul.pipeline.verification.plan import all_checks
from longhaul.pipeline.verification.record import Record, read_record
from longhaul.pipeline.verification.run import EXIT_UNFINISHED, run_checks
from longhaul.pipeline.verification.timings import targets
from longhaul.pipeline.verification.workers import Job, Outcome

GPUS = Machine(
    device="cuda", name="NVIDIA H100 80GB HBM3", capability="9.0", memory_gigabytes=85.0,
    devices=4, driver="580.159.04", cores=1, versions={"torch": "2.11.0"}, code="0123",
)  # fmt: skip
CPU = replace(GPUS, device="cpu", name="Xeon", devices=0, memory_gigabytes=0.0)


def check(name: str, function: Callable[..., Any], **settings: Any) -> Check:
    return Check(
        **{"part": "kernels", "argument": None, "seconds": 60, **settings},
        name=name,
        function=function,
    )


def run(path: Path, *checks: Check, machine: Machine = GPUS) -> int:
    return run_checks(path, machine, checks, lambda results: [], time.monotonic() + 600)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was begun, in order, by jobs that take no time and pass, or that never end."""
    arguments: list[Any] = []

    def run_jobs(jobs: Sequence[Job], *, began: Any = None, ended: Any, **limits: Any) -> None:
        for number, job in enumerate(jobs):
            arguments.append(job.arguments[0])
            if began is not None:
                began([number])
            if job.function is pretended.hangs:
                return  # The deadline is reached.
            ended(number, Outcome("returned", {"ms": 1.0}, 0.1))

    monkeypatch.setattr(running, "run_jobs", run_jobs)
    return arguments


@pytest.mark.usefixtures("begun")
def test_with_a_gpu_it_runs_to_its_end_in_the_promised_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept: list[Record] = []
    monkeypatch.setattr(Record, "_write", lambda self: kept.append(self))
    checks = [replace(one, needs=Needs()) for one in all_checks(GPUS)]
    status = run_checks(tmp_path / "a.json", GPUS, checks, targets, time.monotonic() + 60)
    assert status == 0
    ended = list(kept[-1].results)
    assert ended == [one.key for one in checks]
    assert len(kept[-1].targets) > 10

    def first(*starts: str) -> int:
        """The place of the first check whose key begins so; it is there."""
        return min(ended.index(key) for key in ended if key.startswith(starts))

    places = [
        first("kernels: bfloat16: degree 2, K 64"),
        first("timings: training: degree 2, K 64: longhaul"),
        first("trainer: train: single, bf16-mixed"),
        first("timings: training step"),
        first("kernels: bfloat16: degree 2, K 32"),
        first("timings: decoding"),
        first("kernels: float16"),
        first("kernels: bfloat16: 131,073 tokens"),
        first("kernels: accesses out of bounds"),
        first("trainer: resume"),
        first("trainer: train: ddp on 4 ranks, bf16-mixed"),
        first("kernels: bfloat16: degree 2, K 64, candidate 1"),
        first("timings: training: degree 2, K 64: retention, chunk 1024, part 0 of what it"),
        first("timings: training: degree 2, K 64: retention, chunk 256"),
    ]
    assert places == sorted(places)
    assert places[0] == 0
    printed = capsys.readouterr().out
    assert "target of speed" in printed
    assert "milliseconds" in printed


def test_strategies_are_those_that_the_devices_allow() -> None:
    names = {
        machine.devices: [one.name for one in all_checks(machine) if one.part == "trainer"]
        for machine in (GPUS, replace(GPUS, devices=1), replace(GPUS, devices=11), CPU)
    }
    for precision in ("bf16-mixed", "32-true"):
        assert f"train: fsdp, 2 replicas, 4 ranks, {precision}" in names[4]
        for strategy in ("ddp", "fsdp", "ddp on 4 ranks, compiled", "fsdp on 4 ranks, compiled"):
            label = strategy if " on " in strategy else f"{strategy} on 4 ranks"
            assert f"train: {label}, {precision}" in names[4]
        for stage in (1, 2, 3):
            assert f"train: deepspeed {stage} on 1 rank, {precision}" in names[1]
        assert f"train: context parallel on 8 ranks, {precision}" in names[11]
        assert f"train: context parallel on 2 ranks, {precision}" in names[0]
    assert not any("context parallel" in name or "replicas" in name for name in names[1])


@pytest.mark.parametrize("machine", [GPUS, CPU], ids=["gpu", "cpu"])
def test_every_check_fits_in_a_piece_and_can_be_sent_to_a_process(machine: Machine) -> None:
    checks = all_checks(machine)
    assert len({one.key for one in checks}) == len(checks)
    for one in checks:
        assert one.seconds <= 300
        pickle.loads(pickle.dumps((one.function, one.argument)))
        if machine is CPU:
            assert one.needs.gpu or one.part != "timings"


def test_no_failure_stops_it_and_each_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "verify.json"
    checks = [
        check("a", pretended.passes),
        check("b", pretended.fails),
        check("c", pretended.crashes),
        check("d", pretended.raises),
        check("e", pretended.hangs, seconds=1),
        check("f", pretended.passes, is_alone=False),
        check("g", pretended.passes, needs=Needs(programs=("no-such-program",))),
        check("i", pretended.raises, is_ours=False),
        check("j", pretended.fails, is_ours=False),
        check("h", pretended.passes, needs=Needs(packages=("no_such_package",))),
    ]
    assert run(path, *checks) == 1
    content = read_record(path)
    found = {key: one["status"] for key, one in content["results"].items()}
    assert found == {
        "kernels: a": "passed",
        "kernels: b": "failed",
        "kernels: c": "crashed",
        "kernels: d": "failed",
        "kernels: e": "timed out",
        "kernels: f": "passed",
        "kernels: i": "unavailable",
        "kernels: j": "failed",
        "kernels: g": "skipped",
        "kernels: h": "skipped",
    }
    assert content["results"]["kernels: a"]["result"]["rate"] is None, "JSON has no NaN"
    assert content["machine"]["driver"] == "580.159.04"
    printed = capsys.readouterr().out
    for line in (
        "failed: kernels: b: out: off by 1",
        "crashed: kernels: c: its process was killed by SIGSEGV",
        "timed out: kernels: e: took longer than 1 s",
        "unavailable: kernels: i: RuntimeError: CUDA error: an illegal memory access",
        "skipped, needs a program that is not installed: no-such-program: 1 checks, such as",
        "skipped, needs packages that are not installed: no_such_package",
    ):
        assert line in printed
    # Nothing is left: the same command does nothing, and says the same.
    assert run(path, *checks) == 1
    assert "10 checks, of which 0 are to run" in capsys.readouterr().out


def test_a_later_command_goes_on_where_the_time_ended(tmp_path: Path, begun: list[Any]) -> None:
    path = tmp_path / "verify.json"
    checks = [
        check(name, pretended.hangs if name == "b" else pretended.passes, argument=name)
        for name in "abc"
    ]
    # The end of the time is no fault of the check, however often it comes.
    for _ in range(3):
        assert run(path, *checks) == EXIT_UNFINISHED
        assert "kernels: b" not in json.loads(path.read_text())["results"]
    assert begun == ["a", "b", "b", "b"]


def test_a_check_that_ends_the_command_twice_is_not_begun_again(
    tmp_path: Path, begun: list[Any]
) -> None:
    path = tmp_path / "verify.json"
    checks = [check(name, pretended.passes, argument=name) for name in "abc"]
    for _ in range(2):
        Record(path, GPUS).begin(["kernels: b"])  # and then the command is killed
    assert run(path, *checks) == 1
    content = read_record(path)
    assert content["results"]["kernels: b"]["faults"] == ["did not end in 2 pieces"]
    assert content["results"]["kernels: c"]["status"] == "passed"
    assert len(content["pieces"]) == 3
    assert begun == ["a", "c"]


def test_results_of_other_code_or_another_gpu_are_not_mixed(tmp_path: Path) -> None:
    path = tmp_path / "verify.json"
    assert run(path, machine=GPUS) == 0
    for other in (
        replace(GPUS, code="4567"),
        replace(GPUS, name="NVIDIA H200"),
        replace(GPUS, versions={"torch": "2.13.0"}),
    ):
        with pytest.raises(ValueError, match=r"--json: found .*, begun with .*, wanted "):
            run(path, machine=other)
    content = json.loads(path.read_text())
    content["results"] = {"kernels: a": {"status": "bogus"}}
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"results.kernels: a.status: found 'bogus', wanted"):
        run(path, machine=GPUS)
    path.write_text(path.read_text()[:-9])
    with pytest.raises(ValueError, match=r"--json: found .* damaged \(.*, wanted it whole"):
        run(path, machine=GPUS)
    path.write_text('{"passed": true}')
    with pytest.raises(ValueError, match="wanted one of `longhaul verify`"):
        run(path, machine=GPUS)


@pytest.mark.parametrize(
    "entry",
    [
        None,
        [],
        "passed",
        {},
        {"status": []},
        {"status": {}},
        {"status": None},
        {"status": "bogus"},
        {"status": "begun"},
        {"status": "begun", "attempts": "2"},
        {"status": "begun", "attempts": 10**30},
        {"status": "skipped"},
        {"status": "failed", "faults": "all"},
        {"status": "failed", "faults": [1]},
        {"status": "passed", "result": []},
        {"status": "passed", "seconds": "long"},
        {"status": "passed", "result": {"forward_backward_ms": "fast"}},
        {"status": "passed", "result": {"peak_bytes": [1]}},
    ],
)
def test_a_damaged_entry_of_a_record_is_named(tmp_path: Path, entry: Any) -> None:
    path = tmp_path / "verify.json"
    assert run(path) == 0
    content = json.loads(path.read_text())
    content["results"] = {"timings: \x1b[2J": entry}
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"^--json: .*verify.json: results.'timings: \\x1b") as one:
        run(path)
    assert "\n" not in str(one.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("machine", [], "machine: found "),
        ("machine", {"versions": []}, "machine.versions: found "),
        ("machine", {"versions": {"torch": 2}}, "machine.versions.torch: found 2, wanted "),
        ("machine", {"devices": {}}, "machine.devices: found {}, wanted "),
        ("machine", {"speed": 1}, "with unknown entries, wanted those of this version"),
        ("pieces", {}, "pieces: found "),
        ("pieces", [1], "pieces.0: found 1, wanted "),
        ("pieces", [{"began": [], "seconds": 1.0}], "pieces.0.began: found "),
        ("pieces", [{"began": "now", "seconds": "1"}], "pieces.0.seconds: found '1', wanted "),
        ("results", [], "results: found "),
        ("targets", [1], "targets.0: found 1, wanted "),
    ],
)
def test_every_field_of_a_record_has_a_type(
    tmp_path: Path, name: str, value: Any, message: str
) -> None:
    path = tmp_path / "verify.json"
    assert run(path) == 0
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {name: value}))
    with pytest.raises(ValueError, match=r"^--json: .*verify.json.* " + re.escape(message)) as one:
        run(path)
    assert "\n" not in str(one.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (os.mkfifo, "found a FIFO, wanted a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "found a device, wanted a regular file"),
        (Path.mkdir, "found a folder, wanted a regular file"),
        (lambda path: (path.touch(), os.truncate(path, 1 << 40)), "found more than"),
        (Path.touch, "wanted it whole"),
        (lambda path: path.write_text('{"\\u001b[2J": "\x1b]0;x"}'), "wanted it whole"),
        (lambda path: path.write_text('{"\\u001b[2J": 1}'), "wanted one of `longhaul verify`"),
        (lambda path: path.write_text("[" * 100_000), "wanted it whole"),
        (lambda path: path.write_text("9" * 5000), "wanted"),
    ],
)
def test_a_record_that_is_none_is_refused_in_a_line(
    tmp_path: Path, make: Callable[[Path], Any], message: str
) -> None:
    make(tmp_path / "verify.json")
    with pytest.raises(ValueError, match=message) as one:
        run(tmp_path / "verify.json")
    assert str(one.value).isprintable()
    assert len(str(one.value)) < 1000


def test_a_record_that_is_a_link_to_nothing_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "verify.json").symlink_to(tmp_path / "new.json")
    assert run(tmp_path / "verify.json") == 0
    assert not (tmp_path / "new.json").exists()


def test_counts_say_what_passed_what_failed_and_what_cannot_run(
    tmp_path: Path, begun: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    away = Needs(programs=("no-such-program",))
    checks = [check("a", pretended.passes), check("b", pretended.passes)]
    checks += [check(name, pretended.passes, needs=away) for name in "cde"]
    assert run(tmp_path / "verify.json", *checks) == 0
    printed = capsys.readouterr().out
    assert "5 checks, of which 2 are to run; 3 cannot run here" in printed
    assert "1 of 2: passed" in printed
    assert "2 of 2: passed" in printed
    assert "5 checks: 2 passed, 3 skipped" in printed
