"""C++ functions of this package, compiled for the CPU of this machine when they are first used."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shlex
import signal
import stat
import subprocess
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter

# torch has no public names for these yet.
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

logger = logging.getLogger(__name__)

_HEADERS = Path(__file__).parent
# A compiler on a file system over a network, or on a machine that others use, may need minutes.
_QUIET_SECONDS, _MOST_SECONDS = 30.0, 300.0
_USER_MAP, _OVERFLOW_USER = Path("/proc/self/uid_map"), Path("/proc/sys/kernel/overflowuid")
_TOO_SLOW: set[str] = set()  # compilers that had not ended by then, and are not asked again
_MOST_BYTES = 64 << 20  # of a library, which has some hundred kilobytes
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-shared", "-fPIC")


def load(source: Path) -> ctypes.CDLL | None:
    """The functions of a C++ file; None, with one warning, where it cannot be compiled or loaded.

    What was compiled is kept in the user's cache folder, by the file and all headers, the compiler,
    its flags and the instructions of the CPU: nodes that share a home folder share no wrong code.
    What others can write, or have put there, is not loaded.
    """
    chosen = os.environ.get("CXX") or "c++"
    if chosen in _TOO_SLOW:
        return None
    try:
        command = [*shlex.split(chosen), *_FLAGS]
        # Predefined macros name the version of the compiler and all instructions it may use.
        macros = _run([*command, "-dM", "-E", "-x", "c++", os.devnull])
        files = [*sorted(_HEADERS.glob("*.h")), *sorted(source.parent.glob("*.h")), source]
        content = b"".join(path.read_bytes() for path in files)
        key = hashlib.sha256(shlex.join(command).encode() + macros + content).hexdigest()[:16]
        name = f"{source.stem}-{key}.so"
        kept = cache_folder()
        if kept is not None:
            try:
                return _compiled(command, source, kept / name)
            except TimeoutError:
                raise
            except (OSError, subprocess.CalledProcessError):
                pass  # a full disk
        with tempfile.TemporaryDirectory() as private:
            return _compiled(command, source, Path(private) / name)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        if isinstance(error, TimeoutError):
            _TOO_SLOW.add(chosen)
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
        new.chmod(0o700)  # whatever the umask is
        if os.path.lexists(library):
            new.replace(library)  # it was damaged, or is no file of this user's alone
        else:
            # Other processes may compile the same file at the same time. The first one stays: on
            # a network's file system code that is in use must not be replaced.
            with suppress(FileExistsError):
                os.link(new, library)
    return functions


def _is_whole(library: Path) -> bool:
    """Whether a kept file is one that only this user can write, and ends with its checksum.

    Executing a part of one would be fatal.
    """
    try:
        # Without following a link, and without waiting for somebody to write into a FIFO.
        descriptor = os.open(library, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or not _is_own(status):
            return False
        if status.st_size > _MOST_BYTES:
            return False
        content = os.read(descriptor, status.st_size)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    size = hashlib.sha256().digest_size
    return hashlib.sha256(content[:-size]).digest() == content[-size:]


def cache_folder() -> Path | None:
    """The user's cache folder of the project; None if it cannot be written, or others can."""
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    try:
        folder = (Path(chosen) if os.path.isabs(chosen) else Path.home() / ".cache") / "longhaul"
        for each in (folder.parent, folder):
            each.mkdir(mode=0o700, parents=True, exist_ok=True)
        changer = who_else_can_change(folder)
    except (OSError, RuntimeError):
        return None
    if changer is not None:
        _warn_of_cache(f"{changer}; XDG_CACHE_HOME names another cache folder")
        return None
    return folder if os.access(folder, os.W_OK) else None


def who_else_can_change(folder: Path) -> str | None:
    """Why others than this user and root can change what a folder holds; None if they cannot.

    Who can write to a folder above it can put another in its place. The owners of folders above
    the user's home are trusted, since they could put another home in its place, and those that a
    container shows as nobody's: there, they are what the machine's root owns.

    Raises:
        OSError: the folder does not exist, or one above it cannot be seen.
    """
    status = folder.stat()
    if not _is_own(status):
        return _rights(folder, status)
    above_home = set[Path]()
    with suppress(RuntimeError):  # a user without a home
        above_home = {*Path.home().absolute().parents, *Path.home().resolve().parents}
    trusted = {0, os.getuid(), _user_of_unmapped()}
    for above in dict.fromkeys((*folder.absolute().parents, *folder.resolve().parents)):
        status = above.stat()
        # In a folder with the sticky bit, such as /tmp, nobody can rename what is another's. The
        # user's own group is often one of this user alone.
        others = 0o002 if status.st_gid == os.getgid() else 0o022
        is_open = status.st_mode & others and not status.st_mode & stat.S_ISVTX
        if is_open or (status.st_uid not in trusted and above not in above_home):
            return _rights(above, status)
    return None


def _user_of_unmapped() -> int:
    """The id that owns, in a container, what belongs to users whom it does not know; else root's.

    Where each user of the machine is known, as outside of containers, that id is somebody's.
    """
    try:
        known = sum(int(line.split()[2]) for line in _USER_MAP.read_text().splitlines())
        return int(_OVERFLOW_USER.read_text()) if known < 2**32 - 1 else 0
    except (OSError, ValueError, IndexError):
        return 0


def _is_own(status: os.stat_result) -> bool:
    """Whether something is this user's, and nobody else can write it."""
    return status.st_uid == os.getuid() and not status.st_mode & 0o022


def _rights(path: Path, status: os.stat_result) -> str:
    return f"{path} is user {status.st_uid}'s with mode {stat.S_IMODE(status.st_mode):o}"


def _run(command: list[str]) -> bytes:
    """What a command writes, which gets `_MOST_SECONDS`; a line says so when it takes long.

    Raises:
        OSError: it cannot be started, or has not ended by then.
        CalledProcessError: it ended with another status than 0.
    """
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        process_group=0,  # a compiler starts other programs, which end with it
    ) as process:
        try:
            out, error = _output(process, command[0])
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, out, error)
    return out


def _output(process: subprocess.Popen[bytes], name: str) -> tuple[bytes, bytes]:
    try:
        return process.communicate(timeout=_QUIET_SECONDS)
    except subprocess.TimeoutExpired:
        text = "%s has been compiling C++ for %g s; it gets %g, then torch runs without"
        logger.warning(text, name, _QUIET_SECONDS, _MOST_SECONDS)
    try:
        return process.communicate(timeout=_MOST_SECONDS - _QUIET_SECONDS)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"{name} has not ended after {_MOST_SECONDS:g} s") from None


def _reason(error: Exception) -> str:
    """The first line of the compiler's about an error, or what Python says."""
    if not isinstance(error, subprocess.CalledProcessError):
        return str(error)
    said: str = error.stderr.decode(errors="replace")
    lines = said.strip().splitlines() or [f"{error.cmd[0]} ended with status {error.returncode}"]
    return next((line for line in lines if "error" in line), lines[0])


@cache
def _warn_of_cache(reason: str) -> None:
    """Once, not for each file."""
    logger.warning("compiled C++ is not kept, and compiled again at each start: %s", reason)


@cache
def _warn(reason: str) -> None:
    """Once for each reason, not for each file."""
    logger.warning("float32 on this CPU is slower without compiled C++: %s", reason)


def serves(*tensors: Tensor) -> bool:
    """Whether all tensors are plain ones of float32 on a CPU, whose memory C++ may read.

    Not those that are traced, batched or transformed, nor negated when they are read.
    """
    # Selective activation checkpointing is a mode as well, but need not see what C++ computes.
    is_traced = torch._C._len_torch_dispatch_stack() and not all(
        isinstance(mode, _CachingTorchDispatchMode | _CachedTorchDispatchMode)
        for mode in _get_current_dispatch_mode_stack()
    )
    if is_traced or torch._C._are_functorch_transforms_active():
        return False
    return all(
        type(x) in (Tensor, Parameter)
        and x.dtype == torch.float32
        and x.device.type == "cpu"
        and torch._C._has_storage(x)
        and not x.is_neg()
        for x in tensors
    )
