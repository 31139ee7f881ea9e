"""What `longhaul doctor` says of what a node needs beside its GPUs, which are pretended."""

import os
import resource
import sysconfig
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from longhaul.configs import load_run_config
from longhaul.pipeline.doctor import diagnosis, gpu_checks, machine_checks
from longhaul.pipeline.doctor.finding import Finding
from longhaul.pipeline.doctor.machine_checks import check_gpus

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine that has all that Triton needs, and its cache."""
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.setattr(gpu_checks.shutil, "which", lambda name: f"/usr/bin/{name}")
    listed = "\tlibcuda.so.1 (libc6,x86-64) => /usr/lib/libcuda.so.1"
    monkeypatch.setattr(gpu_checks, "output_of", lambda *command: listed)
    for name in ("TRITON", "TORCHINDUCTOR"):
        monkeypatch.setenv(f"{name}_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("LD_LIBRARY_PATH", "TRITON_LIBCUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("nothing", None),
        ("compiler", "no C compiler"),
        ("header", "/Python.h (a package such as python3-dev)"),
        ("ldconfig", "no /sbin/ldconfig"),
        ("libcuda", "no libcuda.so.1 in the list of /sbin/ldconfig -p"),
        ("cache", "TRITON_CACHE_DIR sets another"),
    ],
)
def test_what_triton_misses_is_named(
    tools: Path, monkeypatch: pytest.MonkeyPatch, missing: str, said: str | None
) -> None:
    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    if missing == "compiler":
        monkeypatch.setattr(gpu_checks.shutil, "which", lambda name: None)
    if missing == "header":
        (tools / "Python.h").unlink()
    if missing in ("ldconfig", "libcuda"):
        answer = None if missing == "ldconfig" else "libm.so"
        monkeypatch.setattr(gpu_checks, "output_of", lambda *command: answer)
    if missing == "cache":
        monkeypatch.setattr(gpu_checks.tempfile, "TemporaryFile", refuse)
    finding = gpu_checks.check_tools()
    assert finding.status == ("ok" if said is None else "FAILURE")
    assert said is None or said in finding.text


def test_what_a_kernel_computes_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked = gpu_checks.power_attention, list[str]()

    def attention(*args: Any, backend: Any, **settings: Any) -> Any:
        asked.append(backend)
        out, state = real(*args, backend="reference", **settings)
        return out * (factor if backend == "triton" else 1), state

    monkeypatch.setattr(gpu_checks, "power_attention", attention)
    factor = 1.0
    assert gpu_checks.check_triton("cpu").status == "ok"
    factor = 0.5
    finding = gpu_checks.check_triton("cpu")
    assert finding[:3] == ("FAILURE", "triton", "power attention is wrong by 50.0%")
    assert asked == ["triton", "reference"] * 2


@pytest.mark.parametrize(("is_needed", "status"), [(True, "FAILURE"), (False, "warning")])
def test_a_compiler_that_fails_or_errs_fails_the_runs_that_need_it(
    monkeypatch: pytest.MonkeyPatch, is_needed: bool, status: str
) -> None:
    def fail(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no C++ compiler")

    compiled: Any
    for compiled, wanted in ((lambda x: x, "wrong value"), (fail, "RuntimeError: no C++")):
        monkeypatch.setattr(torch, "compile", lambda function, to=compiled: to)
        finding = gpu_checks.check_compile("cpu", is_needed=is_needed)
        assert finding.status == status
        assert wanted in finding.text
    monkeypatch.setattr(torch, "compile", lambda function: function)
    assert gpu_checks.check_compile("cpu", is_needed=is_needed).status == "ok"


def test_a_cache_that_many_ranks_share_over_the_network_is_a_warning(
    tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = [
        SimpleNamespace(mountpoint="/", fstype="ext4"),
        SimpleNamespace(mountpoint=str(tools), fstype="nfs4"),
    ]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounts)
    finding = gpu_checks.check_cache(32)
    assert finding.status == "warning"
    assert f"{tools}/cache is on nfs4, where 32 ranks write" in finding.text
    assert gpu_checks.check_cache(1).status == "ok"
    mounts.pop()
    assert gpu_checks.check_cache(32).status == "ok"


@pytest.mark.parametrize("variable", ["TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"])
def test_a_cache_that_others_can_write_is_a_warning(
    tools: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    cache = tools / "of all"
    monkeypatch.setenv(variable, str(cache))
    assert gpu_checks.check_cache(1).status == "ok", "it is not there yet"
    cache.mkdir(mode=0o700)
    assert gpu_checks.check_cache(1).status == "ok"
    cache.chmod(0o777)
    finding = gpu_checks.check_cache(1)
    assert finding.status == "warning"
    assert f"others could put code into {cache}: " in finding.text
    assert finding.remedy == f"export {variable}=FOLDER, one that only you can write"


def test_little_memory_to_lock_is_a_warning_where_there_is_infiniband(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_checks, "_INFINIBAND", tmp_path)
    monkeypatch.setattr(resource, "getrlimit", lambda what: (65536, 65536))
    assert gpu_checks.check_memlock().status == "ok"
    (tmp_path / "mlx5_0").mkdir()
    assert gpu_checks.check_memlock().status == "warning"
    unlimited = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda what: (unlimited, unlimited))
    assert gpu_checks.check_memlock().status == "ok"


@pytest.mark.parametrize(("size", "status"), [(64 << 20, "warning"), (8 << 30, "ok")])
def test_a_containers_little_shared_memory_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, size: int, status: str
) -> None:
    monkeypatch.setattr(gpu_checks.shutil, "disk_usage", lambda path: Usage(size, 0, size))
    assert gpu_checks.check_shared_memory().status == status


@pytest.mark.parametrize(
    ("variables", "status"),
    [
        ({"SLURM_CPUS_PER_TASK": "8", "SLURM_CPUS_ON_NODE": "8"}, "ok"),
        ({"SLURM_CPUS_PER_TASK": "1"}, "warning"),
        ({"SLURM_CPUS_ON_NODE": "8"}, "warning"),
        ({"SLURM_CPUS_ON_NODE": "64"}, "ok"),
        ({}, "warning"),
    ],
)
def test_one_processor_a_rank_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], status: str
) -> None:
    monkeypatch.setattr(os, "environ", variables)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    assert gpu_checks.check_cpus(ranks=8).status == status


def test_a_driver_too_old_for_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for driver, said in (("535.104.05", "535.104.05 is too old, wanted 580"), ("580.95.05", "")):
        monkeypatch.setattr(machine_checks, "driver_version", lambda one=driver: one)
        finding = check_gpus(8)
        assert finding.status == "FAILURE"
        assert said in finding.text
        assert said or "too old" not in finding.text


@pytest.mark.parametrize(
    ("has_tools", "settings", "is_needed"),
    [
        (True, None, True),
        (True, [], True),
        (True, ["trainer.compile=false"], False),
        (True, ["trainer.deterministic=true"], False),
        (False, [], True),
    ],
)
def test_what_lies_beside_gpus_is_checked_where_there_are_some(
    monkeypatch: pytest.MonkeyPatch, has_tools: bool, settings: list[str] | None, is_needed: bool
) -> None:
    def check(subject: str, status: Any = "ok") -> Any:
        return lambda *args, **settings: Finding(status, subject, f"{args} {settings}")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(diagnosis, "check_tools", check("tools", "ok" if has_tools else "FAILURE"))
    for name in ("gpus", "idle", "local_nccl", "triton", "compile", "gloo", "disk"):
        monkeypatch.setattr(diagnosis, f"check_{name}", check(name.removeprefix("local_")))
    run = None if settings is None else load_run_config("run/demo.yaml", settings)
    found = {one.subject: one for one in diagnosis._machine_findings(run, None)}
    assert found.keys() >= {"nccl", "tools", "cache", "memlock", "shm", "cpus"}
    assert ({"triton", "compile"} <= found.keys()) is has_tools
    assert not has_tools or f"'is_needed': {is_needed}" in found["compile"].text
