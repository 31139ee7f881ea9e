"""What `longhaul doctor` says of one machine and one run."""

import importlib.metadata
import shutil
import socket
import threading
from collections import namedtuple
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from longhaul.configs import RunConfig, load_run_config
from longhaul.pipeline.doctor import diagnosis, machine_checks, run_checks
from longhaul.pipeline.doctor.bandwidth import gloo_finding, nccl_finding
from longhaul.pipeline.doctor.diagnosis import EXIT_BAD_MACHINE
from longhaul.pipeline.doctor.finding import Finding, run_check
from longhaul.pipeline.doctor.machine_checks import (
    check_commit,
    check_gpus,
    check_idle,
    check_time,
    check_torch,
)
from longhaul.pipeline.doctor.nodes import JobTask, _findings_from_reports
from longhaul.pipeline.doctor.run_checks import check_shape, check_shards, checkpoint_bytes

Usage = namedtuple("Usage", "total used free")


def _disk(config: RunConfig | None) -> Finding:
    """What is said of the disk, with and without a run."""
    return next(one for one in diagnosis._machine_findings(config, None) if one.subject == "disk")


def _lines(output: str) -> dict[str, str]:
    """Lines by what they are about."""
    return {line.split()[1]: line for line in output.splitlines()}


@pytest.fixture
def damaged(run: Any, corpus: Path) -> Path:
    """The first shard of a copy of the corpus, which the run reads; not yet damaged."""
    shutil.copytree(corpus, run.path / "shards")
    text = (run.path / "small.yaml").read_text()
    (run.path / "small.yaml").write_text(text.replace(f"{corpus}/train", "shards/train"))
    return sorted((run.path / "shards" / "train").glob("*.tar"))[0]


def test_a_machine_alone_is_described_and_passes(run: Any) -> None:
    lines = _lines(run.longhaul("doctor").stdout)
    assert lines.keys() >= {"torch", "commit", "gpu", "gloo", "disk", "slurm"}
    assert lines.keys().isdisjoint({"tracking", "shards", "time"})
    assert torch.__version__ in lines["torch"]
    if not torch.cuda.is_available():
        assert lines["gpu"].startswith("ok ")
        assert "no GPU" in lines["gpu"]


def test_a_sound_run_passes_and_nothing_is_written(run: Any) -> None:
    before = sorted(run.path.rglob("*"))
    lines = _lines(run.longhaul("doctor", "small.yaml").stdout)
    assert all(lines[what].startswith("ok ") for what in ("disk", "tracking", "shards"))
    assert sorted(run.path.rglob("*")) == before


@pytest.mark.wide
def test_a_server_that_is_away_or_hangs_is_named_and_fails_nothing(run: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        hanging = f"http://127.0.0.1:{server.getsockname()[1]}"
        lines = _lines(run.longhaul("doctor", "small.yaml", f"tracking.uri={hanging}").stdout)
        assert lines["tracking"].startswith("warning ")
        assert hanging in lines["tracking"]
        assert "timed out" in lines["tracking"]
    # Nobody listens there any more.
    lines = _lines(run.longhaul("doctor", "small.yaml", f"tracking.uri={hanging}").stdout)
    assert "refused" in lines["tracking"]


@pytest.mark.parametrize("damage", ["short", "changed", "absent"])
def test_a_damaged_shard_is_named(run: Any, damaged: Path, damage: str) -> None:
    content = damaged.read_bytes()
    if damage == "absent":
        damaged.unlink()
    else:
        damaged.write_bytes(content[:-1] if damage == "short" else content[:-1] + b"x")
    done = run.longhaul("doctor", "small.yaml", check=False)
    assert done.returncode == 2
    assert _lines(done.stdout)["shards"].startswith("FAILURE ")
    assert damaged.name in _lines(done.stdout)["shards"]
    replacing = ("data.on_bad_shard=replace", "data.max_bad_fraction=1")
    line = _lines(run.longhaul("doctor", "small.yaml", *replacing).stdout)["shards"]
    assert line.startswith("warning ")
    assert damaged.name in line


@pytest.mark.wide
def test_data_that_hang_are_a_warning_and_hold_nothing_up(run: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/manifest.json"
        hangs = [f"data.manifest={url}", "data.cache_dir=cache"]
        done = run.longhaul("doctor", "small.yaml", *hangs)
    assert _lines(done.stdout)["shards"].startswith("warning ")
    assert "no answer" in _lines(done.stdout)["shards"]


def test_a_file_system_that_fails_is_a_bad_machine(run: Any, damaged: Path) -> None:
    damaged.unlink()
    damaged.symlink_to(damaged)
    done = run.longhaul("doctor", "small.yaml", check=False)
    assert done.returncode == EXIT_BAD_MACHINE
    assert "Too many levels" in _lines(done.stdout)["shards"]


def test_only_what_all_nodes_can_see_may_differ_between_them(run: Any, damaged: Path) -> None:
    config = load_run_config(run.path / "small.yaml", [f"data.manifest={damaged.parent}"])
    content = damaged.read_bytes()
    # Each node hashes other shards, so that one alone may find this.
    damaged.write_bytes(content[:-1] + b"x")
    assert check_shards(config, 0).fault == "input"
    damaged.write_bytes(content[:-1])
    assert check_shards(config, 0).fault == "either"
    (damaged.parent / "manifest.json").unlink()
    assert check_shards(config, 0).fault == "either"


def test_shards_that_take_long_to_read_are_no_failure(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_run_config(run.path / "small.yaml")
    text = check_shards(config, 0).text
    assert "0 of them read" not in text
    assert [part.partition(":")[0] for part in text.split(". ")] == ["training", "validation"]
    monkeypatch.setattr(run_checks, "READING_S", 0.0)
    finding = check_shards(config, 0)
    assert finding.status == "ok"
    assert finding.text.startswith("training: 0 of ")
    assert "; 0 of them read" in finding.text


def test_ids_beyond_the_vocabulary_fail(run: Any) -> None:
    done = run.longhaul("doctor", "small.yaml", "model.vocabulary=100", check=False)
    assert done.returncode == 2
    assert "model.vocabulary" in _lines(done.stdout)["shards"]


def test_room_for_one_checkpoint_is_too_little(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_run_config(run.path / "small.yaml")
    needed = 2 * checkpoint_bytes(config)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(needed, 0, needed))
    assert _disk(config).status != "FAILURE"
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(needed, 1, needed - 1))
    assert _disk(config).status == "FAILURE"
    assert _disk(config).fault == "machine"
    assert _disk(None).status != "FAILURE"


def test_a_folder_that_cannot_be_written_is_a_bad_machine(run: Any) -> None:
    done = run.longhaul("doctor", "small.yaml", "root=/proc/runs", check=False)
    assert done.returncode == EXIT_BAD_MACHINE
    assert "/proc cannot be written" in _lines(done.stdout)["disk"]


def test_a_bad_config_is_one_line(run: Any) -> None:
    done = run.longhaul("doctor", "small.yaml", "model.widht=64", check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert (
        done.stderr == "longhaul: model.widht: unknown key, the nearest known one is model.width\n"
    )


def test_a_check_that_raises_is_a_failure_and_one_that_hangs_what_it_is_told_to_be() -> None:
    raised = run_check("disk", lambda: 1 / 0, 5)
    assert raised == Finding("FAILURE", "disk", "ZeroDivisionError: division by zero")
    released = threading.Event()
    hung = [
        run_check("disk", released.wait, 0.1),
        run_check("gpu", released.wait, 0.1, if_timed_out="FAILURE"),
    ]
    released.set()
    assert [finding.status for finding in hung] == ["warning", "FAILURE"]
    assert all("no answer" in finding.text for finding in hung)


def test_another_triton_than_torch_was_built_with_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    pins = ["filelock", "triton==0.1.2; platform_system == 'Linux'"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda package: pins)
    finding = check_torch()
    assert finding.status == "FAILURE"
    assert finding.remedy == "pip install triton==0.1.2"


def test_gpus_that_the_cpu_build_leaves_idle_are_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert check_gpus(8).status == "warning"
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert check_gpus(8).status == "FAILURE"
    assert check_gpus(8, "cpu").status == "ok"


def test_a_run_on_gpus_fails_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_GPUS_ON_NODE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check_gpus(1, "auto").status == "ok"
    assert check_gpus(1, "gpu").status == "FAILURE"


def test_a_run_on_cpus_asks_no_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(diagnosis, "check_idle", lambda: pytest.fail("asked"))
    config = load_run_config("run/demo.yaml", ["root=runs", "trainer.accelerator=cpu"])
    findings = list(diagnosis._machine_findings(config, None))
    assert "trainer.accelerator is cpu" in next(f.text for f in findings if f.subject == "gpu")
    assert not {"idle", "nccl", "triton"} & {finding.subject for finding in findings}


@pytest.mark.parametrize(("used_gb", "status"), [(0.5, "ok"), (4, "warning"), (40, "FAILURE")])
def test_memory_that_others_use_is_told(
    monkeypatch: pytest.MonkeyPatch, used_gb: float, status: str
) -> None:
    memory = [(80 << 30, 80 << 30), ((80 << 30) - int(used_gb * 2**30), 80 << 30)]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: memory[index])
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 0)
    finding = check_idle()
    assert finding.status == status
    assert status == "ok" or "GPU 1" in finding.text


def test_a_slow_network_is_a_warning() -> None:
    found = [gloo_finding(49e6, ""), gloo_finding(51e6, ""), nccl_finding(4.9e9, "")]
    found.append(nccl_finding(5.1e9, ""))
    assert [finding.status for finding in found] == ["warning", "ok", "warning", "ok"]


def test_a_git_that_does_not_tell_leaves_the_commit_unknown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine_checks, "source_checkout", lambda: tmp_path)
    monkeypatch.setattr(machine_checks, "source_commit", lambda: None)
    finding = check_commit()
    assert finding.status == "warning"
    assert finding.has_timed_out


def _report(commit: str | None = "a", **failed: list[str]) -> dict[str, Any]:
    return {"commit": commit, "gpus": 0, "failures": [], "unless_shared": [], **failed}


@pytest.mark.parametrize(
    ("reports", "failures"),
    [
        ([_report(), _report(None), _report()], []),
        ([_report(), _report("b"), _report()], ["n2 has b, the others a"]),
        ([_report(), _report(), _report(unless_shared=["shards"])], ["bad nodes: n3: shards"]),
        ([_report(unless_shared=["shards"])] * 3, []),
        ([_report(unless_shared=["x"], failures=["y"])] * 2, ["bad nodes: n1: y; n2: y"]),
    ],
)
def test_a_failure_that_not_all_nodes_share_is_a_nodes_own(
    reports: list[dict[str, Any]], failures: list[str]
) -> None:
    names = tuple(f"n{number}" for number in range(1, 1 + len(reports)))
    here = JobTask(job="1", node=0, names=names, is_first_task=True)
    found = list(_findings_from_reports(here, dict(zip(names, reports, strict=True)), []))
    assert [one.text for one in found if one.status == "FAILURE"] == failures
    assert {one.fault for one in found} == {"machine"}


def test_a_run_fits_the_allocation_or_the_step(run: Any) -> None:
    two_nodes = ["trainer.nodes=2", "trainer.strategy=fsdp"]
    config = load_run_config(run.path / "small.yaml", two_nodes)
    found = [check_shape(config, *nodes) for nodes in ((2, 1), (4, 2), (4, 4), (1, 1))]
    assert [one.status for one in found] == ["ok", "ok", "FAILURE", "FAILURE"]
    assert found[2].text == "4 nodes in the allocation, trainer.nodes wants 2"
    assert found[2].fault == "input"


def test_less_time_than_a_last_checkpoint_takes_is_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    end = datetime.now() + timedelta(minutes=10)
    job = {"TimeLimit": "01:00:00", "EndTime": end.isoformat(timespec="seconds")}
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(machine_checks, "slurm_job", lambda job_id: job)
    assert check_time(500).status == "ok"
    assert check_time(700).status == "warning"
    job["EndTime"] = "Unknown"
    assert check_time(700).status == "ok"
