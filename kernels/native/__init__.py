"""C++ functions of this package, compiled for the CPU of this machine when they are first used."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shlex
import subprocess
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter

logger = logging.getLogger(__name__)

_HEADERS = Path(__file__).parent
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-shared", "-fPIC")


def load(source: Path) -> ctypes.CDLL | None:
    """The functions of a C++ file; None, with one warning, where it cannot be compiled or loaded.

    What was compiled is kept in the user's cache folder, by the file and all headers, the compiler,
    its flags and the instructions of the CPU: nodes that share a home folder share no wrong code.
    """
    try:
        compiler = shlex.split(os.environ.get("CXX") or "c++")
        command = [*compiler, *_FLAGS]
        # Predefined macros name the version of the compiler and all instructions it may use.
        macros = _run([*command, "-dM", "-E", "-x", "c++", os.devnull])
        files = [*sorted(_HEADERS.glob("*.h")), *sorted(source.parent.glob("*.h")), source]
        content = b"".join(path.read_bytes() for path in files)
        key = hashlib.sha256(shlex.join(command).encode() + macros + content).hexdigest()[:16]
        name = f"{source.stem}-{key}.so"
        kept = _cache_folder()
        if kept is not None:
            with suppress(OSError, subprocess.CalledProcessError):  # a full disk
                return _compiled(command, source, kept / name)
        with tempfile.TemporaryDirectory() as private:
            return _compiled(command, source, Path(private) / name)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        _warn(f"CXX: {_reason(error)}; wanted GCC 9 or newer with OpenMP")
        return None


def _compiled(command: list[str], source: Path, library: Path) -> ctypes.CDLL:
    if _is_whole(library):
        return ctypes.CDLL(str(library))
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        new = Path(folder) / library.name
        _run([*command, f"-I{_HEADERS}", str(source), "-o", str(new)])
        functions = ctypes.CDLL(str(new))
        with new.open("r+b") as file:
            checksum = hashlib.sha256(file.read()).digest()
            file.write(checksum)  # the loader reads nothing after the last section
            os.fsync(file.fileno())
        if library.exists():
            new.replace(library)  # it was damaged
        else:
            # Other processes may compile the same file at the same time. The first one stays: on
            # a network's file system code that is in use must not be replaced.
            with suppress(FileExistsError):
                os.link(new, library)
    return functions


def _is_whole(library: Path) -> bool:
    """Whether a kept file ends with its checksum: executing a part of one would be fatal."""
    try:
        content = library.read_bytes()
    except OSError:
        return False
    size = hashlib.sha256().digest_size
    return hashlib.sha256(content[:-size]).digest() == content[-size:]


def _cache_folder() -> Path | None:
    """The user's cache folder of the project; None if it cannot be written, or others can."""
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    try:
        folder = (Path(chosen) if os.path.isabs(chosen) else Path.home() / ".cache") / "longhaul"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except (OSError, RuntimeError):
        return None
    is_own = status.st_uid == os.getuid() and not status.st_mode & 0o022
    return folder if is_own and os.access(folder, os.W_OK) else None


def _run(command: list[str]) -> bytes:
    return subprocess.run(command, check=True, capture_output=True).stdout


def _reason(error: Exception) -> str:
    """The first line of the compiler's about an error, or what Python says."""
    if not isinstance(error, subprocess.CalledProcessError):
        return str(error)
    said: str = error.stderr.decode(errors="replace")
    lines = said.strip().splitlines() or [f"{error.cmd[0]} ended with status {error.returncode}"]
    return next((line for line in lines if "error" in line), lines[0])


@cache
def _warn(reason: str) -> None:
    """Once for each reason, not for each file."""
    logger.warning("float32 on this CPU is slower without compiled C++: %s", reason)


def serves(*tensors: Tensor) -> bool:
    """Whether all tensors are plain ones of float32 on a CPU, whose memory C++ may read.

    Not those that are traced, batched or transformed, nor negated when they are read.
    """
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        return False
    return all(
        type(x) in (Tensor, Parameter)
        and x.dtype == torch.float32
        and x.device.type == "cpu"
        and torch._C._has_storage(x)
        and not x.is_neg()
        for x in tensors
    )
