"""Profiles updates with torch.profiler: samples how long a rank communicates, and writes traces."""

import logging
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from longhaul.datamodules.files.atomic import write_atomically

logger = logging.getLogger(__name__)

# Which updates of a process are sampled. Two are early, so that short runs are sampled too: two
# tell a rank that is always slow from one that was delayed once. After them samples are rare,
# because on a CPU evaluating a sample takes a fifth of an update of run/demo.yaml, 0.25 of 1.28 s,
# and longer than an update of a tiny model.
_EARLY_SAMPLES = (5, 6)
_SAMPLE_EVERY = 100
# libkineto's types of activities of a device.
_DEVICE_ACTIVITIES = ("kernel", "gpu_memcpy", "gpu_memset")

# libkineto prints to stderr whenever it starts and stops, unless the log level is raised.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")


class Communication(NamedTuple):
    """How long a rank communicated in an update, in seconds; NaN if the update was not sampled."""

    total: float  # at least one collective was in progress
    exposed: float  # of that time, nothing was computed


NOT_SAMPLED = Communication(float("nan"), float("nan"))


class UpdateProfiler:
    """Profiles whole updates of this rank: samples of its communication, and traces on request.

    All ranks make the same calls, so that all profile the same updates. The profiler records the
    calling thread and the work that it launches on devices, not the thread that writes checkpoints.
    A process that ends while the profiler runs crashes, so `close` must be called first.
    """

    def __init__(self, folder: Path) -> None:
        """`folder` is where traces are written, as `step-NNNNNNNNN-rank-RRRRR.json.gz`."""
        self._folder = folder
        self._running: profile | None = None
        self._first_step = 0
        self._updates_left = 0
        self._is_sample = False
        self._num_updates = 1  # of this process; the first begins before `begin` is called

    @property
    def is_tracing(self) -> bool:
        """Whether a trace is in progress and needs further updates."""
        return self._running is not None and not self._is_sample

    def begin(self, step: int, requested: int) -> None:
        """Call this when an update begins.

        Args:
            step: number of the update.
            requested: number of updates to trace from this one on; 0 for no trace. Ignored while
                another trace is in progress.
        """
        self._num_updates += 1
        if self._running is not None:
            return
        if requested:
            activities = [ProfilerActivity.CPU]
            activities += [ProfilerActivity.CUDA] * torch.cuda.is_available()
        elif _is_sampled(self._num_updates) and _num_ranks() > 1:
            is_on_gpu = dist.get_backend() == "nccl"
            activities = [ProfilerActivity.CUDA if is_on_gpu else ProfilerActivity.CPU]
        else:
            return
        self._is_sample = not requested
        self._first_step = step
        self._updates_left = max(1, requested)
        self._running = profile(activities=activities, record_shapes=not self._is_sample)
        self._running.start()

    def end(self) -> Communication:
        """Call this when an update is done. Returns its communication if it was sampled."""
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
        """Stop the profiler; write the trace in progress, if any, unless `is_wanted` is False."""
        if self._running is None:
            return
        self._running.stop()
        recorded, self._running = self._running, None
        if is_wanted and not self._is_sample:
            self._write(recorded)

    def _write(self, recorded: profile) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        file = self._folder / f"step-{self._first_step:09d}-rank-{rank:05d}.json.gz"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory() as scratch:
                packed = Path(scratch, file.name)
                recorded.export_chrome_trace(str(packed))
                write_atomically(file, packed.read_bytes())
        except OSError as error:
            # A failing profile must not end the training that it observes.
            logger.warning("the trace %s could not be written: %s", file, error)
        else:
            if rank == 0:
                logger.info("traces from step %d on are in %s", self._first_step, self._folder)


def communication(events: Iterable[Any]) -> Communication:
    """Communication time in the events of one update's profile (torch's _KinetoEvent)."""
    communicating, computing = [], []
    for event in events:
        name, activity = event.name(), event.activity_type()
        span = event.start_ns(), event.end_ns()
        # Collectives are gloo's on a CPU, and kernels of NCCL or RCCL on a device.
        if name.startswith("gloo:") or (activity == "kernel" and name.startswith("nccl")):
            communicating.append(span)
        elif name.startswith("aten::") or activity in _DEVICE_ACTIVITIES:
            computing.append(span)
    if not computing:  # Impossible in an update: the driver may forbid profiling.
        return NOT_SAMPLED
    exposed = covered(communicating + computing) - covered(computing)
    return Communication(covered(communicating) / 1e9, exposed / 1e9)


def covered(spans: Iterable[tuple[int, int]]) -> int:
    """Total length of the union of intervals (start, end)."""
    length, reached = 0, -sys.maxsize
    for start, end in sorted(spans):
        length += max(0, end - max(start, reached))
        reached = max(reached, end)
    return length


def _events(recorded: profile) -> list[Any]:
    """torch's internal events, because making its public ones takes many times as long."""
    results: Any = recorded.profiler
    return list(results.kineto_results.events())


def _is_sampled(number: int) -> bool:
    return number in _EARLY_SAMPLES or number % _SAMPLE_EVERY == 0


def _num_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
