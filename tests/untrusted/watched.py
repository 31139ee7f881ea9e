"""Runs `longhaul` commands in forks of one process, and tells what they wrote, started and asked.

Not a test. As a program it reads one JSON object a line, {"arguments", "folder", "out"}, and
answers with one: the exit status, null after the time limit. The events that Python's audit hooks
see go to a file.
"""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SECONDS = 60
_MOST_BYTES = 12 << 30  # of address space, beyond what was mapped before the fork
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_PATHS = ("os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod", "os.chown", "os.utime")
_TWO_PATHS = ("os.rename", "os.link", "os.symlink")
_PROCESSES = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "pty.spawn")
_NETWORK = ("socket.connect", "socket.sendto", "socket.getaddrinfo", "urllib.Request")


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    status: int | None
    """None: it was ended after SECONDS."""
    text: str
    """What it printed."""
    events: list[tuple[str, str]]
    """`write PATH`, `process NAME` and `network ADDRESS`, in their order."""

    def of(self, kind: str) -> set[str]:
        return {what for one, what in self.events if one == kind}


class Watched:
    """The process that commands are forked from."""

    def __init__(self, environment: Mapping[str, str], trace: Path | None) -> None:
        """`trace` is where strace writes the system calls of all commands, None without it."""
        command = [sys.executable, "-P", __file__]
        if trace is not None:
            calls = (
                "execve,execveat,connect,sendto,openat,open,creat,truncate,unlink,unlinkat,"
                "rename,renameat,renameat2,link,linkat,symlink,symlinkat,mkdir,mkdirat,chmod,fchmodat"
            )
            options = ["-f", "-qq", "-y", "-s", "4096", "--seccomp-bpf"]
            command = ["strace", *options, "-e", f"trace={calls}", "-o", str(trace), *command]
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._ask({})  # until all is imported

    def run(self, arguments: list[str], folder: Path, out: Path) -> Outcome:
        """Run a command in a folder. What it prints, and its events, go to files beside `out`."""
        answer = self._ask({"arguments": arguments, "folder": str(folder), "out": str(out)})
        lines = Path(f"{out}.events").read_text(errors="replace").splitlines()
        return Outcome(
            answer["status"],
            out.read_text(errors="surrogateescape"),
            [tuple(json.loads(line)) for line in lines],
        )

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def _ask(self, question: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


def _serve() -> None:
    _import_all()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        question = json.loads(line)
        answer = {"status": _forked(question)} if question else {}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _import_all() -> None:
    import importlib

    from longhaul.pipeline.cli import COMMANDS
    from longhaul.pipeline.evaluation.registry import TASKS

    for name in COMMANDS:
        if name != "help":
            importlib.import_module(f"longhaul.pipeline.commands.{name}")
    modules = [
        *(
            "training.run",
            "evaluation.run",
            "generation.run",
            "preparation.run",
            "doctor.diagnosis",
        ),
        *("exporting.folder", "reporting.folder", "cluster.submission", "planning.tables"),
        "runs.averaging",
    ]
    for module in modules:
        importlib.import_module(f"longhaul.pipeline.{module}")
    for module in (
        *(task.module_name for name, task in TASKS.items() if name != "lm-eval"),
        *("matplotlib.pyplot", "mlflow.tracking", "mlflow.store.tracking.sqlalchemy_store"),
        *("sqlalchemy.dialects.sqlite", "fsspec.implementations.http"),
    ):
        importlib.import_module(module)


def _forked(question: dict[str, Any]) -> int | None:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _run(question)
    deadline = time.monotonic() + SECONDS
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            break
        if time.monotonic() > deadline:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # workers that outlive a failure
    return os.waitstatus_to_exitcode(status)


def _run(question: dict[str, Any]) -> None:
    """The command, in the fork; never returns."""
    status = 1
    try:
        os.setsid()
        os.chdir(question["folder"])
        handle = os.open(question["out"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        events = os.open(f"{question['out']}.events", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(handle, stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + _MOST_BYTES,) * 2)
        from longhaul.pipeline.cli import main

        sys.addaudithook(_Hook(events))
        sys.argv[1:] = question["arguments"]
        status = main(question["arguments"])
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        status = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


class _Hook:
    def __init__(self, file: int) -> None:
        self._file = file

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            if isinstance(path, str | bytes | os.PathLike) and (
                (isinstance(flags, int) and flags & _WRITES)
                or (isinstance(mode, str) and set(mode) & set("wax+"))
            ):
                self._tell("write", _real(path, -1))
        elif event in _PATHS:
            self._tell("write", _real(arguments[0], arguments[-1]))
        elif event in _TWO_PATHS:
            for path in arguments[1 if event == "os.symlink" else 0 : 2]:
                self._tell("write", _real(path, -1))
        elif event == "sqlite3.connect" and "?mode=ro&" not in str(arguments[0]):
            self._tell("write", _real(arguments[0], -1))
        elif event in _PROCESSES:
            self._tell("process", os.path.basename(os.fsdecode(arguments[0] or arguments[1][0])))
        elif event in _NETWORK:
            address = arguments[-1] if event == "socket.connect" else arguments[0]
            self._tell("network", str(address))

    def _tell(self, kind: str, what: str) -> None:
        os.write(self._file, json.dumps([kind, what]).encode() + b"\n")


def _real(path: Any, folder: Any) -> str:
    """The absolute path with the links of its folder resolved, and its own for what is opened."""
    if isinstance(path, int):
        return f"/proc/self/fd/{path}"
    text = os.fsdecode(path)
    if isinstance(folder, int) and folder >= 0 and not os.path.isabs(text):
        text = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), text)
    return os.path.join(
        os.path.realpath(os.path.dirname(os.path.abspath(text))), os.path.basename(text)
    )


if __name__ == "__main__":
    _serve()
