"""A small corpus, a small run, and `longhaul` commands in processes of their own."""

import fcntl
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import psutil
import pytest

from longhaul.datamodules.workers import _SIGNALS
from longhaul.pipeline.evaluation.registry import TASKS
from longhaul.pipeline.tracking.mlflow_run import _make_sqlite, load_mlflow

CHECKOUT = Path(__file__).parent.parent.parent
TRACED = Path(__file__).parent / "traced_longhaul.py"

SMALL_RUN = """
name: small
root: {root}
model:
  layers: 2
  width: 32
  heads: 2
  vocabulary: 320
  attention: {{kind: conformal_sympow}}
data:
  manifest: {corpus}/train
  validation_manifest: {corpus}/validation
  validation_tokens: 384
  context: 64
optim:
  tokens_per_update: 512
  learning_rate: 3.0e-3
  schedule: {{name: cosine, warmup_tokens: 2048}}
trainer:
  max_tokens: {max_tokens}
  micro_batch: 4
  validate_every_tokens: 5120
checkpoint:
  every_tokens: 2048
tracking:
  uri: sqlite:///{root}/mlflow.db
  experiment: tests
"""

# Importing all this takes many times as long as a small run. It is done once, in a process that
# does nothing else, and of which every command is a fork.
_FORKS = multiprocessing.get_context("forkserver")
_IMPORTED = [
    "longhaul.pipeline.training.run",
    "longhaul.pipeline.evaluation.run",
    "longhaul.pipeline.generation.run",
    "longhaul.pipeline.preparation.run",
    *(task.module_name for name, task in TASKS.items() if name != "lm-eval"),
    "matplotlib.pyplot",
    "mlflow.tracking",
    "mlflow.store.tracking.sqlalchemy_store",
    "sqlalchemy.dialects.sqlite",
]
_FORKED = """
import atexit, multiprocessing, os, resource, signal, socket, sys, threading, traceback
from multiprocessing import forkserver
# What a forked process starts would be forked from the same one.
multiprocessing.set_start_method(start_method, force=True)
# A shell lets what it starts in the background ignore interrupts, and so their children.
signal.signal(signal.SIGINT, signal.default_int_handler)
os.setsid()
os.chdir(folder)
os.environ.clear()
os.environ.update(environment)
for stream, file in ((1, out), (2, error)):
    os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
# A fork server for its data workers, in its session, which has imported all they need.
address, (alive, other_end) = f"\\0longhaul-{os.getpid()}", os.pipe()
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind(address)
    listener.listen()
    server = os.fork()
    if server == 0:
        os.close(other_end)
        # As longhaul starts its own: it outlives signals to the whole group.
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        try:
            forkserver.main(listener.fileno(), alive, [])
        finally:
            os._exit(0)
os.close(alive)
forkserver._forkserver._forkserver_address = address
forkserver._forkserver._forkserver_alive_fd = other_end
forkserver._forkserver._forkserver_pid = server
if largest_file is not None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
sys.argv[1:] = arguments
status = 0
try:
    exec(code, {"__name__": "__main__"})
except SystemExit as end:
    status = end.code
except BaseException:
    traceback.print_exc()
    status = 1
# A process of multiprocessing ends without atexit, where data loaders let go of their workers.
threading._shutdown()
atexit._run_exitfuncs()
sys.stdout.flush()
sys.stderr.flush()
os._exit(status or 0)
"""

_FORKS.set_forkserver_preload(_IMPORTED)


class Command:
    """Python code with arguments, started; it is waited for like a subprocess.Popen."""

    def __init__(
        self, code: str, folder: Path, *arguments: str, largest_file: int | None = None
    ) -> None:
        # Closed, and so removed, with the command.
        self._files = [tempfile.NamedTemporaryFile("r") for _ in range(2)]  # noqa: SIM115
        given = {
            "code": code,
            "folder": str(folder),
            "arguments": list(arguments),
            "largest_file": largest_file,
            "environment": dict(os.environ),
            "out": self._files[0].name,
            "error": self._files[1].name,
            "start_method": multiprocessing.get_start_method(),
            "signals": _SIGNALS,
        }
        self._process = _FORKS.Process(target=exec, args=(_FORKED, given))
        # Data workers have one of their own set, which would count if the server was started anew.
        _FORKS.set_forkserver_preload(_IMPORTED)
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int | None:
        self.communicate()
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def communicate(self, timeout: float = 120) -> tuple[str, str]:
        """What it had printed at its end, to stdout and stderr."""
        self._process.join(timeout)
        is_late = self._process.exitcode is None
        if is_late:
            os.killpg(self.pid, signal.SIGKILL)
            self._process.join()
        for file in self._files:
            file.seek(0)
        texts = self._files[0].read(), self._files[1].read()
        assert not is_late, f"still running after {timeout} s\n{texts}"
        return texts

    def end(self, seconds: float = 120) -> tuple[int | None, str]:
        """Status and what was said on stderr; nothing of the command is alive afterwards."""
        _, error = self.communicate(timeout=seconds)
        deadline = time.monotonic() + 40
        while alive := self._alive():
            assert time.monotonic() < deadline, f"orphans: {alive}"
            time.sleep(0.2)
        return self.returncode, error

    def _alive(self) -> list[int]:
        found = []
        for process in psutil.process_iter():
            try:
                is_ours = os.getpgid(process.pid) == self.pid
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process.pid)
            except (ProcessLookupError, psutil.NoSuchProcess):
                continue
        return found

    def rank_1(self) -> psutil.Process:
        """The process of rank 1, which rank 0 started."""
        for child in psutil.Process(self.pid).children():
            if child.environ().get("LOCAL_RANK") == "1":
                return child
        raise AssertionError("no rank 1")


@dataclass(frozen=True)
class RunFolder:
    """A working folder with `small.yaml` in it, and the commands run there."""

    path: Path

    @property
    def trace(self) -> Path:
        return self.path / "trace.jsonl"

    def longhaul(
        self, *arguments: str, check: bool = True, largest_file: int | None = None
    ) -> "subprocess.CompletedProcess[str]":
        """`longhaul ARGUMENTS` to its end; no file may grow beyond `largest_file` bytes."""
        command = self.start(*arguments, largest_file=largest_file)
        out, error = command.communicate()
        status = command.returncode
        assert status is not None
        assert status == 0 or not check, f"{out}\n{error}"
        return subprocess.CompletedProcess(arguments, status, out, error)

    def start(self, *arguments: str, largest_file: int | None = None) -> Command:
        """Start `longhaul ARGUMENTS`, each training batch appended to trace.jsonl."""
        code = f"import runpy; runpy.run_path({str(TRACED)!r}, run_name='__main__')"
        return Command(code, self.path, *arguments, largest_file=largest_file)

    @property
    def last_step(self) -> int:
        """The last update that the trace has seen begin, -1 before the first."""
        if not self.trace.exists():
            return -1
        lines = self.trace.read_text().splitlines()
        return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=-1)

    def wait_for_step(self, process: Command, step: int) -> None:
        """Until a process has begun the update after so many."""
        deadline = time.monotonic() + 120
        while self.last_step < step:
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline, f"step {step} was not reached"
            time.sleep(0.02)


MakeRun = Callable[..., RunFolder]


@pytest.fixture(scope="session", autouse=True)
def fork_server() -> None:
    """The process that commands are forked from, started before a test asks for one of its own."""
    resource_tracker.ensure_running()
    forkserver.ensure_running()


@pytest.fixture(scope="session")
def fork() -> Callable[..., Command]:
    """Starts Python code in a folder, with arguments, in a process that has imported longhaul."""
    return Command


Fill = Callable[[Path], None]


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Fill], Path]:
    """A folder that is filled by the first of all workers to ask for it; nobody changes it."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent

    def make(name: str, fill: Fill) -> Path:
        folder = shared / name
        with (shared / f"{name}.lock").open("a+") as state:
            fcntl.flock(state, fcntl.LOCK_EX)
            state.seek(0)
            if not state.read():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                fill(folder)
                state.write("filled")
        return folder

    return make


@pytest.fixture(scope="session")
def corpus(once: Callable[[str, Fill], Path]) -> Path:
    """Shards of this project's own sources, in short documents; other files for validation."""

    def fill(folder: Path) -> None:
        run = RunFolder(folder)
        for name, source in (("train", "modules"), ("validation", "configs")):
            (folder / source).mkdir()
            for index, file in enumerate(sorted((CHECKOUT / source).glob("*.py"))):
                (folder / source / f"{index:03d}.txt").write_text(file.read_text())
            options = ("--doc-tokens", "1024", "--docs-per-shard", "4")
            # Without a part for validation, which is of other files here.
            options += ("--validation-fraction", "0")
            run.longhaul("prepare", "text", source, name, *options)
            (folder / "shards").mkdir(exist_ok=True)
            (folder / name / "train").rename(folder / "shards" / name)

    return once("corpus", fill) / "shards"


@pytest.fixture(scope="session")
def empty_store(once: Callable[[str, Fill], Path]) -> Path:
    """A database to copy: making one takes MLflow more than a second."""

    def fill(folder: Path) -> None:
        load_mlflow(f"sqlite:///{folder}/mlflow.db")
        _make_sqlite(folder / "mlflow.db", "key")

    return once("empty-store", fill) / "mlflow.db"


@pytest.fixture(scope="session")
def make_run(corpus: Path, empty_store: Path, tmp_path_factory: pytest.TempPathFactory) -> MakeRun:
    """A new folder for a small run of the given number of updates."""

    def make(num_updates: int = 30) -> RunFolder:
        folder = tmp_path_factory.mktemp("run")
        text = SMALL_RUN.format(root=folder, corpus=corpus, max_tokens=512 * num_updates)
        (folder / "small.yaml").write_text(text)
        shutil.copy(empty_store, folder / "mlflow.db")
        return RunFolder(folder)

    return make


@pytest.fixture(scope="session")
def uninterrupted(make_run: MakeRun) -> RunFolder:
    """A run of 30 updates that nothing disturbed."""
    run = make_run()
    run.longhaul("train", "small.yaml")
    return run


@pytest.fixture
def run(make_run: MakeRun) -> RunFolder:
    """A run of 30 updates, not yet started."""
    return make_run()
