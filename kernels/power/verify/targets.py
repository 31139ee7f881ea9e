"""The speeds that are aimed at, beside those that were measured."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from longhaul.kernels.power.verify.peers import DECODERS, Shape, decoding_bytes
from longhaul.kernels.power.verify.tasks import ATTENTION, DECODING, DEGREE_1, HEADLINE, NARROW
from longhaul.kernels.verify.op import Measured

_CROSSOVER_BY = 8192  # tokens
# Of the times that the bytes of 65,536 tokens allow a step to be faster, so many are wanted.
_OF_BYTES = 12 / 14
_BOTH = "forward_backward_ms"


def targets_of(measured: Collection[Measured]) -> list[dict[str, Any]]:
    """Each target beside the measured value; None where a measurement is missing."""
    results = _Results(measured)
    retention = results.fastest(HEADLINE, "retention")
    rate = results.number("forward_backward_tflops", HEADLINE)
    eager, graph = results.crossover(""), results.crossover("_graph")
    lines: list[tuple[str, float | None, float]] = [
        (f"{HEADLINE}: times faster than SDPA-flash", results.faster(HEADLINE, "sdpa flash"), 8.0),
        (
            f"{HEADLINE}: times faster than retention on Triton, the fastest of its settings",
            _ratio(retention, results.number(_BOTH, HEADLINE)),
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
            _ratio(rate, results.number("tflops", "matmul", "torch")),
            0.3,
        ),
        (
            f"{ATTENTION}: times faster than SDPA-flash",
            results.faster(ATTENTION, "sdpa flash"),
            0.7,
        ),
    ]
    for row in DECODING:
        for implementation in DECODERS:
            lines += results.decoding(row, implementation)
    lines.append(
        (
            f"{HEADLINE}: memory allowed over memory used",
            _ratio(
                results.number("allowed_bytes", HEADLINE), results.number("peak_bytes", HEADLINE)
            ),
            1.0,
        )
    )
    found = [
        {"name": name, "value": x, "target": target, "met": None if x is None else x >= target}
        for name, x, target in lines
    ]
    name = f"{HEADLINE}: tokens from which it is faster than SDPA-flash, at most"
    for how, (value, is_met) in (("eager", eager), ("as a graph", graph)):
        found.append(
            {"name": f"{name}, {how}", "value": value, "target": _CROSSOVER_BY, "met": is_met}
        )
    return found


class _Results:
    def __init__(self, measured: Collection[Measured]) -> None:
        self._of = {
            (one.task.row, one.task.implementation): one.result
            for one in measured
            if one.result is not None and one.task.what != "profile"
        }
        self._lengths = {
            one.task.shape.T: one.task.row for one in measured if one.task.row.startswith("T ")
        }

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
        ratios = {
            T: _ratio(
                self.number(_BOTH + suffix, row, "sdpa flash"), self.number(_BOTH + suffix, row)
            )
            for T, row in sorted(self._lengths.items())
        }
        known = {T: ratio for T, ratio in ratios.items() if ratio is not None}
        if not known:
            return None, None
        shortest = None
        for T in reversed(known):
            if known[T] < 1:
                break
            shortest = T
        return shortest, shortest is not None and shortest <= _CROSSOVER_BY


def _possible(implementation: str) -> float:
    """The ratio of the bytes at the headline's sizes, for a result that is missing."""
    return decoding_bytes("sdpa flash", Shape()) / decoding_bytes(implementation, Shape())


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else above / below
