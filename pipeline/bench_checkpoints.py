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
import torch

from longhaul.configs import RunConfig
from longhaul.pipeline.bare_loop import BareLoop, now
from longhaul.pipeline.checkpoint import CheckpointStore
from longhaul.pipeline.optimizer_state import training_tensors
from longhaul.pipeline.sizes import in_bytes

_SAVES = 5  # of each way, after one that is measured for its memory alone
# Updates without a checkpoint, with which those during one are compared.
_WARM_UP = 3
_OTHERS = 10
_BETWEEN = 3


@dataclass(frozen=True)
class _Cost:
    """Of one checkpoint."""

    still_s: float  # training stands still
    longer_s: float  # the updates during it take longer than others, together
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
    _give_back_memory()
    with _peak_memory(loop.device) as alone:
        loop.update()
    lines = [
        f"Checkpoint of {in_bytes(everything)}, with {in_bytes(weights)} of weights, medians of "
        f"{_SAVES}; memory is the peak of the first above what there was before, and "
        f"{in_bytes(alone())} for an update without a checkpoint:\n",
        "| way | training stands still | updates meanwhile | longer by, together | memory |",
        "|---|---|---|---|---|",
    ]
    ways: tuple[tuple[str, Callable[..., _Cost]], ...] = (
        ("blocking", _block),
        ("asynchronous", _go_on),
    )
    for way, save in ways:
        _give_back_memory()
        store = CheckpointStore(Path(config.root) / way, keep_last=1)
        costs = []
        for step in range(1 + _SAVES):
            costs.append(save(loop, store, step, statistics.median(seconds)))
            seconds += [_timed(loop) for _ in range(_BETWEEN)]
        still, longer, updates = (
            statistics.median(getattr(cost, name) for cost in costs[1:])
            for name in ("still_s", "longer_s", "updates")
        )
        lines.append(
            f"| {way} | {still * 1e3:.3g} ms | {updates:g} | {longer * 1e3:.3g} ms "
            f"| {in_bytes(costs[0].memory)} |"
        )
        del store  # with the copy that it keeps
    return "\n".join(lines)


def _timed(loop: BareLoop) -> float:
    before = now(loop.device)
    loop.update()
    return now(loop.device) - before


def _start(loop: BareLoop, store: CheckpointStore, step: int) -> None:
    store.start(step, training_tensors(loop.model, loop.optimizer), {})


def _block(loop: BareLoop, store: CheckpointStore, step: int, update_s: float) -> _Cost:
    with _peak_memory(loop.device) as peak:
        before = now(loop.device)
        _start(loop, store, step)
        store.wait()
        still = time.perf_counter() - before
    return _Cost(still, 0.0, 0, peak())


def _go_on(loop: BareLoop, store: CheckpointStore, step: int, update_s: float) -> _Cost:
    updates: list[float] = []
    with _peak_memory(loop.device) as peak:
        before = now(loop.device)
        _start(loop, store, step)
        still = time.perf_counter() - before
        while store.is_saving or not updates:
            updates.append(_timed(loop))
        before = time.perf_counter()
        store.wait()
        still += time.perf_counter() - before
    return _Cost(still, sum(updates) - len(updates) * update_s, len(updates), peak())


def _give_back_memory() -> None:
    """Return to the system what is free, of which what is measured next would take its part."""
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def _peak_memory(device: torch.device) -> Iterator[Callable[[], int]]:
    """Bytes of the process at their highest above those at the start, of main memory or a GPU's."""
    found = 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield lambda: found
        found = torch.cuda.max_memory_allocated() - before
        return
    process = psutil.Process()
    before = process.memory_info().rss
    try:
        # Linux: the high-water mark begins anew.
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        with _sampled(process) as highest:
            yield lambda: found
        found = max(0, highest() - before)
        return
    yield lambda: found
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    found = max(0, int(line.split()[1]) * 1024 - before)


@contextmanager
def _sampled(process: psutil.Process) -> Iterator[Callable[[], int]]:
    """The most of many looks at the resident bytes."""
    highest = 0
    is_over = threading.Event()

    def look() -> None:
        nonlocal highest
        while not is_over.wait(0.002):
            highest = max(highest, process.memory_info().rss)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    yield lambda: highest
    is_over.set()
    thread.join()
