"""What `longhaul doctor` says of one machine and one run."""

import importlib.metadata
import os
import shutil
import socket
import threading
from collections import namedtuple
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from longhaul.configs import load_run_config
from longhaul.pipeline import doctor_machine, doctor_run
from longhaul.pipeline.bandwidth import gloo_finding, nccl_finding
from longhaul.pipeline.doctor import EXIT_BAD_MACHINE
from longhaul.pipeline.doctor_machine import check_gpus, check_idle, check_time, check_torch
from longhaul.pipeline.doctor_run import check_shards, check_space, checkpoint_bytes
from longhaul.pipeline.finding import Finding, find

Usage = namedtuple("Usage", "total used free")


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
    assert lines.keys().isdisjoint({"space", "tracking", "shards", "time"})
    assert torch.__version__ in lines["torch"]
    if not torch.cuda.is_available():
        assert lines["gpu"].startswith("ok ")
        assert "no GPU" in lines["gpu"]


def test_a_sound_run_passes_and_nothing_is_written(run: Any) -> None:
    before = sorted(run.path.rglob("*"))
    lines = _lines(run.longhaul("doctor", "small.yaml").stdout)
    assert all(lines[what].startswith("ok ") for what in ("disk", "space", "tracking", "shards"))
    assert sorted(run.path.rglob("*")) == before


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


def test_data_that_hang_are_a_bad_machine_and_hold_nothing_up(run: Any) -> None:
    os.mkfifo(run.path / "manifest.json")
    done = run.longhaul("doctor", "small.yaml", "data.manifest=manifest.json", check=False)
    assert done.returncode == EXIT_BAD_MACHINE
    assert "no answer" in _lines(done.stdout)["shards"]


def test_shards_that_take_long_to_read_are_no_failure(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_run_config(run.path / "small.yaml")
    assert "0 of the right hash" not in check_shards(config, 0).text
    monkeypatch.setattr(doctor_run, "_SECONDS_OF_READING", 0.0)
    finding = check_shards(config, 0)
    assert finding.status == "ok"
    assert finding.text.startswith("0 of ")
    assert "0 of the right hash" in finding.text


def test_ids_beyond_the_vocabulary_fail(run: Any) -> None:
    done = run.longhaul("doctor", "small.yaml", "model.vocabulary=100", check=False)
    assert done.returncode == 2
    assert "model.vocabulary" in _lines(done.stdout)["shards"]


def test_room_for_one_checkpoint_is_too_little(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_run_config(run.path / "small.yaml")
    needed = 2 * checkpoint_bytes(config)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(needed, 0, needed))
    assert check_space(config).status == "ok"
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(needed, 1, needed - 1))
    assert check_space(config).status == "FAILURE"


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


def test_a_check_that_raises_or_hangs_is_a_failure() -> None:
    raised = find("disk", lambda: 1 / 0, 5)
    assert raised == Finding("FAILURE", "disk", "ZeroDivisionError: division by zero")
    released = threading.Event()
    hung = find("disk", released.wait, 0.1)
    released.set()
    assert hung.status == "FAILURE"
    assert "no answer" in hung.text


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


def test_a_slow_network_is_a_warning_for_gloo_and_a_failure_for_nccl() -> None:
    found = [gloo_finding(49e6, ""), gloo_finding(51e6, ""), nccl_finding(4.9e9, "")]
    found.append(nccl_finding(5.1e9, ""))
    assert [finding.status for finding in found] == ["warning", "ok", "FAILURE", "ok"]


def test_less_time_than_a_last_checkpoint_takes_is_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    end = datetime.now() + timedelta(minutes=10)
    job = {"TimeLimit": "01:00:00", "EndTime": end.isoformat(timespec="seconds")}
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(doctor_machine, "slurm_job", lambda job_id: job)
    assert check_time(500).status == "ok"
    assert check_time(700).status == "warning"
    job["EndTime"] = "Unknown"
    assert check_time(700).status == "ok"
