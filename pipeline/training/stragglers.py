"""Which rank is slow: what each did in an update of which the profiler saw the communication.

All ranks take the same time for an update, since they wait for each other in collectives. A slow
rank is the one that waits least.
"""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from statistics import median, median_low

from longhaul.pipeline.training.profiling import Communication

logger = logging.getLogger(__name__)

_SLOW = 1.25  # times the median
# Anything may hold a rank up once: it is slow where it is so in two samples in a row. As long as it
# stays so it is named again after so many samples.
_SAMPLES_BETWEEN_WARNINGS = 10


class StragglerReport:
    """One line of JSON for each sampled update, and a warning where a rank is slow."""

    def __init__(self, file: Path, hosts: Sequence[str]) -> None:
        """Name the file that lines are appended to, and the machine of each rank."""
        self._file = file
        self._hosts = list(hosts)
        self._suspects: set[int] = set()
        self._named: set[int] = set()
        self._samples_since = 0

    def add(
        self,
        step: int,
        seconds: Sequence[float],
        communication: Sequence[Communication],
        data_wait: Sequence[float],
        peak_bytes: Sequence[float],
    ) -> dict[str, float]:
        """Write down what each rank did in the update that made `step`.

        Args:
            seconds: of the update, by rank as all that follows.
            communication: in it.
            data_wait: seconds of it, for the loader.
            peak_bytes: high-water mark of memory.

        Returns:
            Metrics by their names: the medians of communication, the slowest rank, and its work
            over the median, which is the lower one of two.
        """
        exposed = [one.exposed for one in communication]
        # A rank that waits for its own loader is as slow as one that computes.
        work = [max(1e-6, all_ - talk) for all_, talk in zip(seconds, exposed, strict=True)]
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
            with open(self._file, "a") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            # Watching must not end what is watched.
            logger.warning("%s could not be written: %s", self._file, error)
        # Of two ranks the mean would never be far from the slower one.
        usual = median_low(work)
        slowest = max(range(len(work)), key=work.__getitem__)
        self._warn(step, work, usual)
        return {
            "train/communication_seconds": median(one.total for one in communication),
            "train/exposed_communication_seconds": median(exposed),
            "train/slowest_rank": slowest,
            "train/slowest_over_median_work": work[slowest] / usual,
        }

    def _warn(self, step: int, work: Sequence[float], usual: float) -> None:
        """Name the ranks that are slow now and were in the sample before."""
        self._samples_since += 1
        slow = {rank for rank, seconds in enumerate(work) if seconds > _SLOW * usual}
        lasting, self._suspects = slow & self._suspects, slow
        if self._samples_since >= _SAMPLES_BETWEEN_WARNINGS:
            self._named = set()
        for rank in sorted(lasting - self._named):
            self._samples_since = 0
            self._named.add(rank)
            logger.warning(
                "rank %d on %s is slow: %.3f s of its own work in the update of step %d, where the "
                "median rank has %.3f s",
                *(rank, self._hosts[rank], work[rank], step, usual),
            )


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 6) for value in values]
