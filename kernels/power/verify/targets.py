"""The speeds that are aimed at, beside those that were measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from longhaul.kernels.power.verify.benchmark import Task
from longhaul.kernels.power.verify.peers import DECODERS, Shape, decoding_bytes
from longhaul.kernels.power.verify.tasks import ATTENTION, DECODING, DEGREE_1, HEADLINE, NARROW

_CROSSOVER_BY = 8192  # tokens
# Of the times that the bytes of 65,536 tokens allow a step to be faster, so many are wanted.
_OF_BYTES = 12 / 14
_BOTH = "forward_backward_ms"


def targets_of(measured: Mapping[Task, dict[str, Any]]) -> list[dict[str, Any]]:
    """Each target beside the measured value; None where a measurement is missing."""
    results = _Results(measured)
    lines: list[tuple[str, float | None, float]] = [
        (f"{HEADLINE}: times faster than SDPA-flash", results.faster(HEADLINE, "sdpa flash"), 8.0),
        (
            f"{HEADLINE}: times faster than retention on Triton, the fastest of its settings",
            _ratio(results.fastest(HEADLINE, "retention"), results.number(_BOTH, HEADLINE)),
            2.5,
        ),
        (f"{NARROW}: times faster than SDPA-flash", results.faster(NARROW, "sdpa flash"), 12.0),
        (
            f"{DEGREE_1}: times faster than chunk_simple_gla",
            results.faster(DEGREE_1, "chunk_simple_gla"),
            1.0,
        ),
        (
            f"{HEADLINE}: fraction of the matmul's rate",
            _ratio(
                results.number("forward_backward_tflops", HEADLINE),
                results.number("tflops", "matmul", "torch"),
            ),
            0.3,
        ),
        (
            f"{ATTENTION}: times faster than SDPA-flash",
            results.faster(ATTENTION, "sdpa flash"),
            0.7,
        ),
        *(line for row in DECODING for one in DECODERS for line in results.decoding(row, one)),
        (
            f"{HEADLINE}: memory allowed over memory used",
            _ratio(
                results.number("allowed_bytes", HEADLINE), results.number("peak_bytes", HEADLINE)
            ),
            1.0,
        ),
    ]
    found = [
        {"name": name, "value": x, "target": target, "met": None if x is None else x >= target}
        for name, x, target in lines
    ]
    name = f"{HEADLINE}: tokens from which it is faster than SDPA-flash, at most"
    for suffix, how in (("", "eager"), ("_graph", "as a graph")):
        value, is_met = results.crossover(suffix)
        found.append(
            {"name": f"{name}, {how}", "value": value, "target": _CROSSOVER_BY, "met": is_met}
        )
    return found


class _Results:
    def __init__(self, measured: Mapping[Task, dict[str, Any]]) -> None:
        self._of = {
            (task.row, task.implementation): result
            for task, result in measured.items()
            if task.what != "profile"
        }
        self._lengths = {task.shape.T: task.row for task in measured if task.row.startswith("T ")}

    def number(self, name: str, row: str, implementation: str = "longhaul") -> float | None:
        found = self._of.get((row, implementation), {}).get(name)
        return None if found is None else float(found)

    def faster(self, row: str, peer: str) -> float | None:
        """How many times as fast as a peer, forward and backward."""
        return _ratio(self.number(_BOTH, row, peer), self.number(_BOTH, row))

    def fastest(self, row: str, peer: str) -> float | None:
        """The least milliseconds of a peer's several settings."""
        times = [self.number(_BOTH, *key) for key in self._of if key[0] == row and peer in key[1]]
        return min((time for time in times if time is not None), default=None)

    def decoding(self, row: str, implementation: str) -> Iterator[tuple[str, float | None, float]]:
        """One token, eager and as a CUDA graph: name, times as fast as SDPA, target.

        A token has to move the bytes of a state, or of all keys and values: no kernel does better
        than the ratio of the two, at 65,536 tokens 14 with a float32 state and 28 in bfloat16.
        """
        for number, how in (("ms_graph", "as a graph"), ("ms", "eager")):
            faster, possible = (
                _ratio(self.number(name, row, "sdpa flash"), self.number(name, row, implementation))
                for name in (number, "bytes")
            )
            state = implementation.removeprefix("longhaul, ")
            name = f"{row}, {state}, {how}: times faster than SDPA-flash"
            yield name, faster, _OF_BYTES * (possible or _possible(implementation))

    def crossover(self, suffix: str) -> tuple[int | None, bool | None]:
        """The shortest length from which this op is faster than SDPA, and if it is short enough."""
        shortest, is_measured = None, False
        for T, row in sorted(self._lengths.items(), reverse=True):
            both = _BOTH + suffix
            ratio = _ratio(self.number(both, row, "sdpa flash"), self.number(both, row))
            if ratio is None:
                continue
            is_measured = True
            if ratio < 1:
                break
            shortest = T
        is_met = shortest is not None and shortest <= _CROSSOVER_BY
        return shortest, is_met if is_measured else None


def _possible(implementation: str) -> float:
    """The ratio of the bytes at the headline's sizes, for a result that is missing."""
    return decoding_bytes("sdpa flash", Shape()) / decoding_bytes(implementation, Shape())


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else above / below
