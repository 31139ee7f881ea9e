"""What a checkpoint costs training, when it blocks training and when it is asynchronous."""

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

_SAVES = 5  # per way of saving, after a first one that measures memory only
# Updates without a checkpoint, with which updates during a checkpoint are compared.
_WARM_UP = 3
_UPDATES_BEFORE = 10
_UPDATES_BETWEEN = 3


@dataclass(frozen=True)
class _Cost:
    """The cost of one checkpoint."""

    blocked_s: float  # seconds for which training is blocked
    delay_s: float  # total extra seconds of the updates during it
    updates: int  # number of updates during it
    memory: int  # bytes of main memory at the peak, above those before


def table(config: RunConfig) -> str:
    """A table of the time and memory of both ways; checkpoints are written to the config's root."""
    loop = BareLoop(config)
    seconds = [_timed(loop) for _ in range(_WARM_UP + _UPDATES_BEFORE)][_WARM_UP:]
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
        f"{_SAVES}. Peak memory is main memory above that before, during the first checkpoint; "
        f"an update without a checkpoint needs {in_bytes(alone())}:\n",
        "| way | training blocked | updates meanwhile | their delay in total | peak memory |",
        "|---|---|---|---|---|",
    ]
    for way in ("blocking", "asynchronous"):
        print(f"checkpoints: {way}", flush=True)
        _release_free_memory()
        store = CheckpointStore(Path(config.root) / way, keep_last=1)
        costs = []
        for step in range(1 + _SAVES):
            update_s = statistics.median(seconds)
            costs.append(_save(loop, store, step, update_s, is_blocking=way == "blocking"))
            seconds += [_timed(loop) for _ in range(_UPDATES_BETWEEN)]
        blocked, delay, updates = (
            statistics.median(getattr(cost, name) for cost in costs[1:])
            for name in ("blocked_s", "delay_s", "updates")
        )
        lines.append(
            f"| {way} | {blocked * 1e3:.3g} ms | {updates:g} | {delay * 1e3:.3g} ms "
            f"| {in_bytes(costs[0].memory)} |"
        )
        del store  # frees the copy that it holds
    return "\n".join(lines)


def _timed(loop: BareLoop) -> float:
    before = synchronized_time(loop.device)
    loop.update()
    return synchronized_time(loop.device) - before


def _save(
    loop: BareLoop, store: CheckpointStore, step: int, update_s: float, *, is_blocking: bool
) -> _Cost:
    updates: list[float] = []
    with _peak_memory() as peak:
        before = synchronized_time(loop.device)
        store.start(step, training_tensors(loop.model, loop.optimizer), {})
        if is_blocking:
            store.wait()
        blocked = time.perf_counter() - before
        while not is_blocking and (store.is_saving or not updates):
            updates.append(_timed(loop))
        before = time.perf_counter()
        store.wait()
        blocked += time.perf_counter() - before
    return _Cost(blocked, sum(updates) - len(updates) * update_s, len(updates), peak())


def _release_free_memory() -> None:
    """Return free memory to the system; the next measurement would reuse it and seem too small."""
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


@contextmanager
def _peak_memory() -> Iterator[Callable[[], int]]:
    """The process's main memory in bytes at its highest, minus that at the start."""
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
