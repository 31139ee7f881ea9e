"""What a rank does within updates, seen by torch.profiler: how long it communicates, and traces."""

import logging
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

logger = logging.getLogger(__name__)

# Updates of a process: early ones for short runs, two to tell a slow rank from one that was held
# up, and then now and then: on a CPU, reading a sample takes a fifth of an update of run/demo.yaml,
# 0.25 of 1.28 s, and more than the whole of one of a tiny model.
_EARLY_SAMPLES = (5, 6)
_SAMPLE_EVERY = 100
# What libkineto calls the work of a device.
_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")

# libkineto tells on stderr when it begins and ends unless only what is graver is let through.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")


class Communication(NamedTuple):
    """How long a rank communicated in an update, in seconds; NaN where nobody looked."""

    total: float  # some collective was under way
    exposed: float  # of that, nothing was computed meanwhile


NOT_SAMPLED = Communication(float("nan"), float("nan"))


class UpdateProfiler:
    """Records whole updates of this rank: samples of its communication, and traces on request.

    All ranks make the same calls, so that all record the same updates. What is recorded is of the
    thread that calls, and of what it starts: a checkpoint that is being written is not seen. A
    process that ends while the profiler runs crashes, hence `close`.
    """

    def __init__(self, folder: Path) -> None:
        """Name where traces are written, `step-NNNNNNNNN-rank-RRRRR.json.gz`."""
        self._folder = folder
        self._running: profile | None = None
        self._first_step = 0
        self._updates_left = 0
        self._is_sample = False
        self._num_updates = 1  # of this process; the first begins before `begin` is called

    @property
    def is_tracing(self) -> bool:
        """Whether a trace is under way, which takes more updates than the one that is done."""
        return self._running is not None and not self._is_sample

    def begin(self, step: int, requested: int) -> None:
        """The update that makes `step` begins now; a trace of `requested` updates, if more than 0.

        A trace that is under way goes on, whatever is requested.
        """
        self._num_updates += 1
        if self._running is not None:
            return
        has_gpu = torch.cuda.is_available()
        if requested:
            activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * has_gpu
        elif _is_sampled(self._num_updates) and _num_ranks() > 1:
            activities = [ProfilerActivity.CUDA if has_gpu else ProfilerActivity.CPU]
        else:
            return
        self._is_sample = not requested
        self._first_step = step
        self._updates_left = max(1, requested)
        self._running = profile(activities=activities, record_shapes=not self._is_sample)
        self._running.start()

    def end(self) -> Communication:
        """The update is done: its communication, if it was sampled."""
        if self._running is None:
            return NOT_SAMPLED
        self._updates_left -= 1
        if self._updates_left:
            return NOT_SAMPLED
        if not self._is_sample:
            self.close()
            return NOT_SAMPLED
        self._running.stop()
        recorded, self._running = self._running, None
        return communication(_events(recorded))

    def close(self, *, is_wanted: bool = True) -> None:
        """Record no longer, and write the trace that was under way, if any, where it is wanted."""
        if self._running is None:
            return
        self._running.stop()
        recorded, self._running = self._running, None
        if is_wanted and not self._is_sample:
            self._write(recorded)

    def _write(self, recorded: profile) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        file = self._folder / f"step-{self._first_step:09d}-rank-{rank:05d}.json.gz"
        temporary = file.with_name(f".{file.name}")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            recorded.export_chrome_trace(str(temporary))
            os.replace(temporary, file)
        except OSError as error:
            # Watching must not end what is watched.
            logger.warning("the trace %s could not be written: %s", file, error)
        else:
            if rank == 0:
                logger.info("traces from step %d on are in %s", self._first_step, self._folder)


def communication(events: Iterable[Any]) -> Communication:
    """The communication among the events of a profile (torch's _KinetoEvent), of one update."""
    talking, computing = [], []
    for event in events:
        name, kind = event.name(), event.activity_type()
        span = event.start_ns(), event.end_ns()
        # On a CPU the collectives of gloo, on a device the kernels of NCCL or RCCL.
        if name.startswith("gloo:") or (kind == "kernel" and name.startswith("nccl")):
            talking.append(span)
        elif name.startswith("aten::") or kind in _DEVICE_WORK:
            computing.append(span)
    if not computing:  # No update is like that: the driver may forbid to look.
        return NOT_SAMPLED
    exposed = covered(talking + computing) - covered(computing)
    return Communication(covered(talking) / 1e9, exposed / 1e9)


def covered(spans: Iterable[tuple[int, int]]) -> int:
    """Length of the union of intervals (start, end)."""
    length, reached = 0, -sys.maxsize
    for start, end in sorted(spans):
        length += max(0, end - max(start, reached))
        reached = max(reached, end)
    return length


def _events(recorded: profile) -> list[Any]:
    """As torch has them: turning them into objects of Python takes many times as long."""
    results: Any = recorded.profiler
    return list(results.kineto_results.events())


def _is_sampled(number: int) -> bool:
    return number in _EARLY_SAMPLES or number % _SAMPLE_EVERY == 0


def _num_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
