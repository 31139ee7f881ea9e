"""The measured column of docs/reproduction.md: `python docs/scripts/reproduction.py RUNS`.

Reads the journals of the runs that the page's commands train, and what they evaluate, and prints
each quantity as the mean over seeds of *paired* differences, its standard error, and the seeds.
"""

import csv
import math
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean

from longhaul.pipeline.evaluation.figures import standard_error
from longhaul.pipeline.tracking.metrics_journal import read_lines

_CONTEXTS, _SEEDS = (128, 512, 2048), (0, 1, 2)
_KINDS = ("softmax", "sympow", "sympow_gated", "conformal_sympow")
_BIASED = {"sympow_gated": "bias-seed={}", "conformal_sympow": "bias-conformal-seed={}"}
_PARTS = {"first tenth": (0.0, 0.1), "second tenth": (0.1, 0.2), "last tenth": (0.9, 1.0)}

Measured = Callable[[int], float]  # of a seed; NaN where its run is not there


class Runs:
    """Losses of finished runs by name, in nats per byte; NaN of those that are not finished."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.losses = dict[str, list[float]]()

    def training(self, name: str, start: float, end: float) -> float:
        """Mean training loss between two shares of a run's updates."""
        losses = self._losses(name)
        part = losses[round(start * len(losses)) : round(end * len(losses))]
        return fmean(part) if part else math.nan

    def first_sequences(self, name: str, context: int, sequences: int) -> float:
        """Mean training loss over the last tenth of a run's first `sequences` windows."""
        losses = self._losses(name)
        updates = sequences * context // 2048
        part = losses[math.ceil(0.9 * updates) : updates]
        return fmean(part) if part else math.nan

    def validation(self, name: str) -> float:
        lines = self._lines(name, "validation")
        return float(lines[-1]["values"]["validation/loss"]) if lines else math.nan

    def at(self, name: str, first: int, last: int) -> float:
        """Mean loss at positions first to last, from `evaluate --tasks positions`."""
        files = sorted((self.folder / name).glob("evaluation/*context-8192/positions.csv"))
        if not files:
            return math.nan
        with files[-1].open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if first <= int(row["position"]) <= last]
        return fmean(float(row["loss_nats"]) for row in rows)

    def _losses(self, name: str) -> list[float]:
        if name not in self.losses:
            lines = self._lines(name, "train")
            self.losses[name] = [float(line["values"]["train/loss"]) for line in lines]
        return self.losses[name]

    def _lines(self, name: str, kind: str) -> list[dict[str, dict[str, float]]]:
        run = self.folder / name
        if not (run / "DONE").exists():
            return []
        return [line for line in read_lines(run / "logs/metrics.jsonl")[0] if line["kind"] == kind]


def _name(kind: str, context: int, seed: int) -> str:
    return f"repro-small-{context}-seed={seed}-kind={kind}"


def _told(what: str, measured: Measured) -> None:
    values = [value for value in map(measured, _SEEDS) if math.isfinite(value)]
    if values:
        error = standard_error(values)
        print(f"{what:64} {fmean(values):+8.4f} ± {error:.4f}  ({len(values)} seeds)")


def _each(kinds: Iterable[str] = _KINDS) -> Iterable[tuple[str, int]]:
    return ((kind, context) for kind in kinds for context in _CONTEXTS)


def main(runs: Runs) -> None:
    def tail(kind: str, context: int, seed: int, part: str = "last tenth") -> float:
        return runs.training(_name(kind, context, seed), *_PARTS[part])

    def few(kind: str, context: int, seed: int) -> float:
        return runs.first_sequences(_name(kind, context, seed), context, 1953)

    def gap(kind: str, context: int, seed: int) -> float:
        return few(kind, context, seed) - few("softmax", context, seed)

    for kind, context in _each():
        _told(
            f"validation loss, {kind}, {context}",
            lambda s, k=kind, c=context: runs.validation(_name(k, c, s)),
        )
    for kind, context in _each(_KINDS[1:]):
        _told(
            f"1, 4: gap to softmax at 1,953 sequences, {kind}, {context}",
            lambda s, k=kind, c=context: gap(k, c, s),
        )
        _told(
            f"gap to softmax, validation loss, {kind}, {context}",
            lambda s, k=kind, c=context: (
                runs.validation(_name(k, c, s)) - runs.validation(_name("softmax", c, s))
            ),
        )
    for kind in _KINDS[1:]:
        _told(
            f"1, 4: gap at 2,048 minus gap at 128, {kind}",
            lambda s, k=kind: gap(k, 2048, s) - gap(k, 128, s),
        )
    for context in _CONTEXTS:
        _told(
            f"2: gated minus sympow, last tenth, {context}",
            lambda s, c=context: tail("sympow_gated", c, s) - tail("sympow", c, s),
        )
        for part in _PARTS:
            _told(
                f"3: conformal minus gated, {part}, {context}",
                lambda s, c=context, p=part: (
                    tail("conformal_sympow", c, s, p) - tail("sympow_gated", c, s, p)
                ),
            )
    for kind in _KINDS:
        _told(
            f"5: loss at 4,096 to 8,192 minus at 256 to 512, {kind}",
            lambda s, k=kind: (
                runs.at(_name(k, 512, s), 4096, 8192) - runs.at(_name(k, 512, s), 256, 512)
            ),
        )
    _told(
        "6: conformal minus gated at 4,096 to 8,192",
        lambda s: (
            runs.at(_name("conformal_sympow", 512, s), 4096, 8192)
            - runs.at(_name("sympow_gated", 512, s), 4096, 8192)
        ),
    )
    for kind, biased in _BIASED.items():
        for what, loss in {
            "last tenth": lambda name: runs.training(name, 0.9, 1.0),
            "validation loss": runs.validation,
        }.items():
            _told(
                f"bias minus none, {what}, {kind}, 512",
                lambda s, k=kind, b=biased, of=loss: (
                    of(f"repro-small-{b.format(s)}") - of(_name(k, 512, s))
                ),
            )


if __name__ == "__main__":
    main(Runs(Path(sys.argv[1])))
