"""Checks of what a node with GPUs needs beside them: compilers, memory to share, processors."""

import os
import resource
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from longhaul.kernels.native import who_else_can_change
from longhaul.kernels.power import power_attention
from longhaul.pipeline.doctor.finding import Finding
from longhaul.pipeline.doctor.machine_checks import nearest_existing
from longhaul.pipeline.system.compile_caches import TRITON, compile_caches
from longhaul.pipeline.system.programs import output_of
from longhaul.pipeline.terminal.numbers import in_bytes

_FEWEST_CPUS = 4
_SHARED_BYTES = 1 << 30
_INFINIBAND = Path("/sys/class/infiniband")
_SHARED = Path("/dev/shm")
_LIBCUDA = "libcuda.so.1"
_REMOTE = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "panfs", "wekafs")


def check_tools() -> Finding:
    """Whether there is all that Triton needs to build what launches its kernels."""
    missing = list(_missing_tools())
    if missing:
        text = f"Triton cannot compile: found no {', no '.join(missing)}"
        return Finding("FAILURE", "tools", text, "install them on the compute nodes, too")
    return Finding("ok", "tools", f"Triton's compilers, and its cache {_cache()}")


def _missing_tools() -> Iterator[str]:
    if not any(map(shutil.which, (os.environ.get("CC") or "gcc", "gcc", "clang"))):
        yield "C compiler"
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if not header.exists():
        yield f"{header} (a package such as python3-dev)"
    if torch.version.hip is None and "TRITON_LIBCUDA_PATH" not in os.environ:
        folders = os.environ.get("LD_LIBRARY_PATH", "").split(":")
        known = output_of("/sbin/ldconfig", "-p")
        if known is None:
            yield "/sbin/ldconfig"
        elif _LIBCUDA not in known and not any(Path(one, _LIBCUDA).exists() for one in folders):
            yield f"{_LIBCUDA} in the list of /sbin/ldconfig -p"
    try:
        tempfile.TemporaryFile(dir=nearest_existing(_cache())).close()
    except OSError as error:
        yield f"writable {_cache()} ({error.strerror}; TRITON_CACHE_DIR sets another)"


def _cache() -> Path:
    return compile_caches()[TRITON]


def check_triton(device: str = "cuda") -> Finding:
    """Whether Triton's power attention compiles, runs, and computes what it should.

    These are the forward kernels of the papers' long contexts, with as much shared memory as there.
    """
    # Triton's interpreter, in which a test runs this on a CPU, is wrong in bfloat16.
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v = torch.randn(3, 1, 96, 1, 64, device=device, dtype=dtype).unbind(0)
    found, wanted = (
        power_attention(q, k, v, degree=2, form="chunked", chunk_size=64, backend=backend)[0]
        for backend in ("triton", "reference")
    )
    error = float((found - wanted).abs().max() / wanted.abs().max())
    if not error < 0.03:  # operands in bfloat16 have two to three digits
        text = f"power attention is wrong by {error:.1%}"
        return Finding("FAILURE", "triton", text, "leave this node out")
    return Finding("ok", "triton", "power attention compiles, and computes what its formula does")


def check_compile(device: str = "cuda", *, is_needed: bool) -> Finding:
    """Whether torch.compile works. Where no run needs it, a failure is only a warning."""
    x = torch.arange(1000.0, device=device)
    try:
        found = torch.compile(_squares)(x)
        if torch.allclose(found, _squares(x)):
            return Finding("ok", "compile", "torch.compile compiles a function and runs it")
        text = "a function compiled by torch.compile computes a wrong value"
    except Exception as error:
        text = f"torch.compile fails: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    remedy = "trainer.compile=false does without it"
    return Finding("FAILURE" if is_needed else "warning", "compile", text, remedy)


def _squares(x: torch.Tensor) -> torch.Tensor:
    return (x * x + 1).sqrt()


def check_cache(ranks: int) -> Finding:
    """Whether others could change what is compiled, or many ranks write it over the network."""
    for variable, cache in compile_caches().items():
        changer = who_else_can_change(cache) if cache.exists() else None
        if changer is not None:
            text = f"others could put code into {cache}: {changer}; runs use another folder"
            remedy = f"export {variable}=FOLDER, one that only you can write"
            return Finding("warning", "cache", text, remedy)
    folder = nearest_existing(_cache()).resolve()
    mounts = [one for one in psutil.disk_partitions(all=True) if _is_below(folder, one.mountpoint)]
    kind = max(mounts, key=lambda one: len(one.mountpoint)).fstype if mounts else "unknown"
    if ranks > 1 and kind in _REMOTE:
        text = f"{_cache()} is on {kind}, where {ranks} ranks write what they compile"
        remedy = "export TRITON_CACHE_DIR=/tmp/triton-$USER before `longhaul submit`"
        return Finding("warning", "cache", text, remedy)
    return Finding("ok", "cache", f"{_cache()} is on {kind}")


def _is_below(folder: Path, mountpoint: str) -> bool:
    return folder == Path(mountpoint) or Path(mountpoint) in folder.parents


def check_memlock() -> Finding:
    """Whether InfiniBand, where there is some, can register enough memory."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY:
        return Finding("ok", "memlock", "no limit of locked memory")
    text = f"at most {in_bytes(limit)} of locked memory"
    if not (_INFINIBAND.is_dir() and any(_INFINIBAND.iterdir())):
        return Finding("ok", "memlock", f"{text}, and no InfiniBand that needs more")
    remedy = "ulimit -l unlimited; LimitMEMLOCK=infinity for slurmd"
    return Finding("warning", "memlock", f"{text}, wanted no limit for InfiniBand", remedy)


def check_shared_memory() -> Finding:
    """Whether ranks, NCCL and data workers can share memory; containers often allow 64 MB."""
    try:
        size = shutil.disk_usage(_SHARED).total
    except OSError as error:
        return Finding("warning", "shm", f"{_SHARED}: {error.strerror}", "mount it")
    if size < _SHARED_BYTES:
        text = f"{in_bytes(size)} in {_SHARED}, wanted {in_bytes(_SHARED_BYTES)}"
        return Finding("warning", "shm", text, "for a container, --shm-size=8g or --ipc=host")
    return Finding("ok", "shm", f"{in_bytes(size)} in {_SHARED}")


def check_cpus(ranks: int) -> Finding:
    """Whether each rank has processors for its threads, workers, checkpoints and compilers.

    Args:
        ranks: of this node.
    """
    environment = os.environ
    if "SLURM_CPUS_PER_TASK" in environment:
        cpus = int(environment["SLURM_CPUS_PER_TASK"])
    else:
        found = environment.get("SLURM_CPUS_ON_NODE", "")
        cpus = (int(found) if found.isdigit() else len(os.sched_getaffinity(0))) // max(1, ranks)
    text = f"{cpus} processors for each of {ranks} ranks"
    if cpus < _FEWEST_CPUS:
        remedy = "slurm.cpus_per_task=8, or more processors for this container"
        return Finding("warning", "cpus", f"{text}, wanted {_FEWEST_CPUS} or more", remedy)
    return Finding("ok", "cpus", text)
