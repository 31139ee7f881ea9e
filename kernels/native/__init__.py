"""C++ functions of this package, compiled for the CPU of this machine when they are first used."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shlex
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter

logger = logging.getLogger(__name__)

_HEADERS = Path(__file__).parent
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-shared", "-fPIC", f"-I{_HEADERS}")


@cache
def load(source: Path) -> ctypes.CDLL | None:
    """The functions of a C++ file; None, with one warning, where it cannot be compiled.

    What was compiled is kept in the user's cache folder, by the file and all headers, the compiler
    and the instructions of the CPU, so nodes that share a home folder share no wrong code.
    """
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    try:
        # Predefined macros name the version of the compiler and all instructions it may use.
        macros = _run([*compiler, *_FLAGS, "-dM", "-E", "-x", "c++", os.devnull])
        files = [*sorted(_HEADERS.glob("*.h")), *sorted(source.parent.glob("*.h")), source]
        content = b"".join(path.read_bytes() for path in files)
        key = hashlib.sha256(content + macros).hexdigest()[:16]
        with tempfile.TemporaryDirectory() as private:
            library = _cache_folder(Path(private)) / f"{source.stem}-{key}.so"
            if not library.exists():
                _compile(compiler, source, library)
            return ctypes.CDLL(str(library))
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or str(error).encode()
        line = reason.decode(errors="replace").strip().partition("\n")[0]
        _warn(line)
        return None


@cache
def _warn(reason: str) -> None:
    """Once for each reason, not for each file."""
    logger.warning("float32 on this CPU is slower, as C++ could not be compiled: %s", reason)


def serves(*tensors: Tensor) -> bool:
    """Whether all tensors are plain ones of float32 on a CPU, whose memory C++ may read."""
    return all(
        type(x) in (Tensor, Parameter) and x.dtype == torch.float32 and x.device.type == "cpu"
        for x in tensors
    )


def _compile(compiler: list[str], source: Path, library: Path) -> None:
    """Other processes may compile the same file at the same time: the last one stays."""
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        new = Path(folder) / library.name
        _run([*compiler, *_FLAGS, str(source), "-o", str(new)])
        new.replace(library)


def _cache_folder(otherwise: Path) -> Path:
    """The user's cache folder of the project, or the one given if that cannot be written."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "longhaul"
    try:
        folder = folder.expanduser()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return otherwise
    is_own = folder.stat().st_uid == os.getuid() and os.access(folder, os.W_OK)
    return folder if is_own else otherwise


def _run(command: list[str]) -> bytes:
    return subprocess.run(command, check=True, capture_output=True).stdout
