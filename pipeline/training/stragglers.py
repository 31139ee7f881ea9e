"""Finds ranks that are slow, from the updates in which the profiler sampled communication.

All ranks take the same time for an update, because they wait for each other in collectives. The
slow rank is the one that waits least.
"""

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import median, median_low

from longhaul.datamodules.files.untrusted import open_to_write
from longhaul.pipeline.training.profiling import Communication

logger = logging.getLogger(__name__)

# A rank is slow in a sample if its work takes this many times the median rank's.
_SLOW = 1.25
# A single delay means nothing, so a rank is reported when it is slow in two samples in a row. While
# it stays slow, the warning is repeated after this many samples.
_SAMPLES_BETWEEN_WARNINGS = 10


class StragglerReport:
    """Appends one line of JSON per sampled update to logs/ranks.jsonl, and warns of slow ranks."""

    def __init__(self, file: Path, hosts: Sequence[str]) -> None:
        """Prepare the report; `add` writes the first line.

        Args:
            file: where lines are appended.
            hosts: host name of each rank.
        """
        self._file = file
        self._hosts = list(hosts)
        self._suspects: set[int] = set()
        self._warned_of: set[int] = set()
        self._samples_since = 0

    def add(
        self,
        step: int,
        seconds: Sequence[float],
        communication: Sequence[Communication],
        data_wait: Sequence[float],
        peak_bytes: Sequence[float],
    ) -> dict[str, float]:
        """Record one sampled update. Sequences have one entry per rank.

        Args:
            step: number of the update.
            seconds: duration of the update.
            communication: in that time.
            data_wait: seconds of that time spent waiting for the data loader.
            peak_bytes: high-water mark of memory.

        Returns:
            Metrics by name: the medians of communication, the slowest rank, and its work divided by
            the median work. With an even number of ranks that median is the lower middle value.
        """
        exposed = [one.exposed for one in communication]
        # Waiting for its own data loader counts as a rank's work: the other ranks wait for it too.
        work = [max(1e-6, total - waiting) for total, waiting in zip(seconds, exposed, strict=True)]
        line = {
            "step": step,
            "hosts": self._hosts,
            "work": _rounded(work),
            "communication": _rounded([one.total for one in communication]),
            "exposed_communication": _rounded(exposed),
            "data_wait": _rounded(data_wait),
            "peak_bytes": [int(value) for value in peak_bytes],
        }
        try:
            with open(open_to_write(self._file, os.O_WRONLY | os.O_APPEND), "a") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            # A failing report must not end the training that it observes.
            logger.warning("%s could not be written: %s", self._file, error.strerror or error)
        # The lower median, because with two ranks the mean is never far from the slower one.
        median_work = median_low(work)
        slowest = max(range(len(work)), key=work.__getitem__)
        self._warn_of_slow_ranks(step, work, median_work)
        return {
            "train/communication_seconds": median(one.total for one in communication),
            "train/exposed_communication_seconds": median(exposed),
            "train/slowest_rank": slowest,
            "train/slowest_over_median_work": work[slowest] / median_work,
        }

    def _warn_of_slow_ranks(self, step: int, work: Sequence[float], median_work: float) -> None:
        """Warn of ranks that are slow in this sample and were slow in the one before."""
        self._samples_since += 1
        slow = {rank for rank, seconds in enumerate(work) if seconds > _SLOW * median_work}
        lasting, self._suspects = slow & self._suspects, slow
        if self._samples_since >= _SAMPLES_BETWEEN_WARNINGS:
            self._warned_of = set()
        for rank in sorted(lasting - self._warned_of):
            self._samples_since = 0
            self._warned_of.add(rank)
            logger.warning(
                "rank %d on %s is slow: %.3f s of its own work in the update of step %d, where the "
                "median rank has %.3f s",
                *(rank, self._hosts[rank], work[rank], step, median_work),
            )


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 6) for value in values]
