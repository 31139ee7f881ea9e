"""What a checkpoint costs training: blocking, and written while training goes on."""

import ctypes
import gc
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from longhaul.configs import RunConfig
from longhaul.pipeline.benchmarks.bare_loop import BareLoop, synchronized_time
from longhaul.pipeline.checkpoints.optimizer_state import training_tensors
from longhaul.pipeline.checkpoints.store import CheckpointStore
from longhaul.pipeline.terminal.numbers import in_bytes

_SAVES = 5  # of each way, after one that is measured for its memory alone
# Updates without a checkpoint, with which those during one are compared.
_WARM_UP = 3
_OTHERS = 10
_BETWEEN = 3


@dataclass(frozen=True)
class _Cost:
    """Of one checkpoint."""

    blocked_s: float  # training stands still
    slowdown_s: float  # the updates during it take longer than others, together
    updates: int  # during it
    memory: int  # bytes, the peak above what there was before


def table(config: RunConfig) -> str:
    """Time and memory of both ways; checkpoints are written to the config's root."""
    loop = BareLoop(config)
    seconds = [_timed(loop) for _ in range(_WARM_UP + _OTHERS)][_WARM_UP:]
    tensors = training_tensors(loop.model, loop.optimizer)
    weights, everything = (
        sum(t.numel() * t.element_size() for name, t in tensors.items() if name.startswith(group))
        for group in ("model/", "")
    )
    _release_free_memory()
    with _peak_memory() as alone:
        loop.update()
    lines = [
        f"Checkpoint of {in_bytes(everything)}, with {in_bytes(weights)} of weights, medians of "
        f"{_SAVES}; main memory is the peak of the first above what there was before, and "
        f"{in_bytes(alone())} for an update without a checkpoint:\n",
        "| way | training stands still | updates meanwhile | longer by, together | memory |",
        "|---|---|---|---|---|",
    ]
    for way in ("blocking", "asynchronous"):
        print(f"checkpoints: {way}", flush=True)
        _release_free_memory()
        store = CheckpointStore(Path(config.root) / way, keep_last=1)
        costs = []
        for step in range(1 + _SAVES):
            if way == "blocking":
                costs.append(_save_blocking(loop, store, step))
            else:
                costs.append(_save_asynchronously(loop, store, step, statistics.median(seconds)))
            seconds += [_timed(loop) for _ in range(_BETWEEN)]
        still, longer, updates = (
            statistics.median(getattr(cost, name) for cost in costs[1:])
            for name in ("blocked_s", "slowdown_s", "updates")
        )
        lines.append(
            f"| {way} | {still * 1e3:.3g} ms | {updates:g} | {longer * 1e3:.3g} ms "
            f"| {in_bytes(costs[0].memory)} |"
        )
        del store  # with the copy that it keeps
    return "\n".join(lines)


def _timed(loop: BareLoop) -> float:
    before = synchronized_time(loop.device)
    loop.update()
    return synchronized_time(loop.device) - before


def _start(loop: BareLoop, store: CheckpointStore, step: int) -> None:
    store.start(step, training_tensors(loop.model, loop.optimizer), {})


def _save_blocking(loop: BareLoop, store: CheckpointStore, step: int) -> _Cost:
    with _peak_memory() as peak:
        before = synchronized_time(loop.device)
        _start(loop, store, step)
        store.wait()
        still = time.perf_counter() - before
    return _Cost(still, 0.0, 0, peak())


def _save_asynchronously(
    loop: BareLoop, store: CheckpointStore, step: int, update_s: float
) -> _Cost:
    updates: list[float] = []
    with _peak_memory() as peak:
        before = synchronized_time(loop.device)
        _start(loop, store, step)
        still = time.perf_counter() - before
        while store.is_saving or not updates:
            updates.append(_timed(loop))
        before = time.perf_counter()
        store.wait()
        still += time.perf_counter() - before
    return _Cost(still, sum(updates) - len(updates) * update_s, len(updates), peak())


def _release_free_memory() -> None:
    """Return to the system what is free, of which what is measured next would take its part."""
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


@contextmanager
def _peak_memory() -> Iterator[Callable[[], int]]:
    """Bytes of main memory of the process at their highest above those at the start."""
    process = psutil.Process()
    before = highest = process.memory_info().rss
    is_over = threading.Event()

    def look() -> None:
        nonlocal highest
        while not is_over.wait(0.002):
            highest = max(highest, process.memory_info().rss)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    yield lambda: highest - before
    is_over.set()
    thread.join()
