"""Trains the runs of a sweep on this machine, one after another or several at a time."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

from longhaul.configs import ConfigError, RunConfig, to_yaml
from longhaul.datamodules.files.atomic import write_atomically
from longhaul.datamodules.files.untrusted import open_to_write
from longhaul.pipeline.runs.data import check_run
from longhaul.pipeline.runs.folder import RunFolder
from longhaul.pipeline.runs.sweep import Sweep
from longhaul.pipeline.system.devices import uses_gpu
from longhaul.pipeline.system.processes import end_with_parent
from longhaul.pipeline.system.waiting import POLL_S
from longhaul.pipeline.tracking.metrics_journal import EXIT_BUSY
from longhaul.pipeline.training.preemption import EXIT_CHECKPOINTED

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_EXIT_INTERRUPTED = 130  # as any command ends after Ctrl-C


def train_sweep(sweep: Sweep, *, parallel: int) -> int:
    """Train all runs that are not finished, each in a process of its own.

    A signal, Ctrl-C included, stops the runs with a checkpoint. The same sweep then resumes them.

    Args:
        parallel: most runs at the same time. One run alone writes to the terminal, several to
            `SWEEP/logs/NAME.log`.

    Returns:
        0 if all runs are finished; 130 after Ctrl-C; EXIT_BUSY if another process trains one of
        them, such as another sweep of the same runs; EXIT_CHECKPOINTED after another signal, or if
        a run was asked to stop.

    Raises:
        ConfigError: before anything is written, a run of that name is another one, there are no
            such data, or there are too few GPUs.
        RuntimeError: runs failed, which is said when the others have ended.
        OSError: a run could not be started; the others have been stopped with a checkpoint.
    """
    for config in sweep.configs:
        check_run(config)
    trainers = [config.trainer for config in sweep.configs]
    has_gpus = any(uses_gpu(one.accelerator) for one in trainers)
    gpus = torch.cuda.device_count() if has_gpus else 0
    places = deque(_environments(parallel, max(one.devices for one in trainers), gpus))
    waiting = deque(enumerate(_unfinished(sweep.below_parent().configs), start=1))
    total = len(waiting)
    running: list[_Process] = []
    statuses: dict[str, int] = {}
    with _received_signals() as received, _stopped_on_failure(running):
        forwarded = 0
        while running or (waiting and not received):
            while waiting and places and not received:
                number, config = waiting.popleft()
                print(f"sweep: run {config.name}, {number} of {total}", flush=True)
                log = sweep.folder / "logs" / f"{config.name}.log" if parallel > 1 else None
                running.append(_start(config, sweep.folder, places.popleft(), log))
            if forwarded < len(received):
                forwarded = len(received)
                for process in running:
                    # The run saves a checkpoint; at a second signal it ends at once.
                    process.popen.send_signal(signal.SIGTERM)
            time.sleep(POLL_S)
            for process in [one for one in running if one.popen.poll() is not None]:
                running.remove(process)
                places.append(process.environment)
                status = process.popen.returncode
                if received and status == -signal.SIGTERM:  # it had not begun to train
                    status = EXIT_CHECKPOINTED
                statuses[process.name] = status
                print(f"sweep: run {process.name} {_describe_exit(process, status)}", flush=True)
    return _outcome(sweep.folder, statuses, len(waiting), received)


@dataclass(frozen=True)
class _Process:
    name: str
    popen: "subprocess.Popen[bytes]"
    environment: dict[str, str]
    log: Path | None


def _unfinished(configs: Sequence[RunConfig]) -> list[RunConfig]:
    """The runs that are left to do: a finished one may still have to be uploaded to MLflow."""
    left = []
    for config in configs:
        finished = RunFolder.of(config).finished()
        is_trained = finished is not None and finished.tokens >= config.trainer.max_tokens
        if finished is not None and is_trained and finished.is_tracked:
            print(f"sweep: run {config.name} is finished already", flush=True)
        else:
            left.append(config)
    return left


def _environments(parallel: int, devices: int, gpus: int) -> list[dict[str, str]]:
    """The environment variables of each of the runs that are trained at the same time."""
    if parallel == 1:
        return [{}]
    if not gpus:
        # Each process would start as many threads as there are cores.
        threads = max(1, (os.cpu_count() or 1) // (parallel * devices))
        return [{"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}] * parallel
    if gpus < parallel * devices:
        raise ConfigError(
            f"--parallel: found {parallel} runs on {devices} of {gpus} GPUs each, wanted at most "
            f"{gpus // devices}"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
    names = visible.split(",")
    return [
        {"CUDA_VISIBLE_DEVICES": ",".join(names[first : first + devices])}
        for first in range(0, parallel * devices, devices)
    ]


def _start(
    config: RunConfig, folder: Path, environment: dict[str, str], log: Path | None
) -> _Process:
    """Start `longhaul train` in a session of its own, so that Ctrl-C reaches only this process."""
    file = folder / "configs" / f"{config.name}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, to_yaml(config))
    command = [sys.executable, "-P", "-m", "longhaul.pipeline.cli", "train", str(file)]
    with ExitStack() as stack:
        out = None
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            out = stack.enter_context(open(open_to_write(log, os.O_WRONLY | os.O_APPEND), "ab"))
        popen = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=None if out is None else subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
    return _Process(config.name, popen, environment, log)


@contextmanager
def _received_signals() -> Iterator[list[int]]:
    """The signals that arrive within the context, which then do nothing else."""
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before = {number: signal.signal(number, receive) for number in _SIGNALS}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _stopped_on_failure(running: Sequence[_Process]) -> Iterator[None]:
    """If the context fails, stop these runs, which in sessions of their own would go on unseen."""
    try:
        yield
    except BaseException:
        for process in running:
            process.popen.send_signal(signal.SIGTERM)
        for process in running:
            process.popen.wait()
        raise


def _describe_exit(process: _Process, status: int) -> str:
    told = {
        0: "is finished",
        EXIT_CHECKPOINTED: "is stopped",
        EXIT_BUSY: "is trained by another process",
    }
    text = told.get(status, f"failed with status {status}")
    return text if process.log is None or status == 0 else f"{text}; see {process.log}"


def _outcome(
    folder: Path, statuses: dict[str, int], not_started: int, received: Sequence[int]
) -> int:
    orderly = (0, EXIT_CHECKPOINTED, EXIT_BUSY)
    failed = {name: status for name, status in statuses.items() if status not in orderly}
    if failed:
        names = ", ".join(f"{name} (status {status})" for name, status in failed.items())
        runs = "1 run" if len(failed) == 1 else f"{len(failed)} runs"
        raise RuntimeError(f"sweep {folder}: found {runs} that failed: {names}")
    ended = Counter(statuses.values())
    stopped, busy = ended[EXIT_CHECKPOINTED], ended[EXIT_BUSY]
    if not stopped and not busy and not not_started:
        print(f"sweep {folder} is finished")
        return 0
    runs = "1 run" if stopped == 1 else f"{stopped} runs"
    print(
        f"longhaul: sweep {folder}: {runs} stopped, {busy} trained by another process, "
        f"{not_started} not started; run the same command to resume",
        file=sys.stderr,
    )
    if received:
        return _EXIT_INTERRUPTED if received[0] == signal.SIGINT else EXIT_CHECKPOINTED
    return EXIT_BUSY if busy else EXIT_CHECKPOINTED
