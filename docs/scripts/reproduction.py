"""The measured columns of docs/reproduction.md, from docs/reproduction/runs.csv.

    python docs/scripts/reproduction.py [RUNS]

With a folder of runs, those of the page's commands that are finished there are first added to the
file. Prints each quantity as the mean over seeds of *paired* differences, its standard error, and
the number of seeds.
"""

import csv
import math
import sys
from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path
from statistics import fmean

from pydantic.dataclasses import dataclass

from longhaul.pipeline.evaluation.figures import standard_error
from longhaul.pipeline.tracking.metrics_journal import read_lines

_FILE = Path(__file__).parent.parent / "reproduction/runs.csv"
CONTEXTS, _SEEDS = (128, 512, 2048), (0, 1, 2)
_GATED, _CONFORMAL = "sympow_gated", "conformal_sympow"
KINDS = ("softmax", "sympow", _GATED, _CONFORMAL)
_TOKENS_PER_UPDATE, _SEQUENCES = 2048, 1953

Key = tuple[str, str, int, int]  # kind, gate_init, context, seed


@dataclass(frozen=True)
class Row:
    """What is kept of a finished run. Losses are in nats per byte."""

    kind: str
    gate_init: str
    context: int
    seed: int
    commit: str
    data_sha256: str
    hardware: str
    validation: float
    first_tenth: float  # mean training loss of these updates
    second_tenth: float
    last_tenth: float
    sequences: float  # of the last tenth of the first 1,953 windows
    within: float  # at positions 256 to 512; NaN where no evaluation has read 8,192 tokens
    beyond: float  # at positions 4,096 to 8,192

    @property
    def key(self) -> Key:
        return self.kind, self.gate_init, self.context, self.seed


def collected(folder: Path) -> Row | None:
    """The row of a run; None of one that is not finished, or not of the page's runs."""
    if not (folder / "DONE").exists():
        return None
    lines = read_lines(folder / "logs/metrics.jsonl")[0]
    params: dict[str, str] = next(line["values"] for line in lines if line["kind"] == "params")
    losses = [line["values"]["curves/train_loss"] for line in lines if line["kind"] == "train"]
    validation = [line["values"] for line in lines if line["kind"] == "validation"]
    context = int(params["data.context"])
    updates = _SEQUENCES * context // _TOKENS_PER_UPDATE

    def part(start: float, end: float) -> float:
        return fmean(losses[round(start * len(losses)) : round(end * len(losses))])

    return Row(
        kind=params["model.attention.kind"],
        gate_init=params.get("model.attention.gate_init", ""),
        context=context,
        seed=int(params["trainer.seed"]),
        commit=params["commit"],
        data_sha256=params["data_sha256"],
        hardware=params["hardware"],
        validation=validation[-1]["curves/validation_loss"],
        first_tenth=part(0.0, 0.1),
        second_tenth=part(0.1, 0.2),
        last_tenth=part(0.9, 1.0),
        sequences=fmean(losses[math.ceil(0.9 * updates) : updates]),
        within=_at(folder, 256, 512),
        beyond=_at(folder, 4096, 8192),
    )


def _at(folder: Path, first: int, last: int) -> float:
    """Mean loss at positions first to last, from `evaluate --tasks positions`."""
    files = sorted(folder.glob("evaluation/*context-8192/positions.csv"))
    if not files:
        return math.nan
    with files[-1].open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if first <= int(row["position"]) <= last]
    return fmean(float(row["loss_nats"]) for row in rows)


def stored() -> dict[Key, Row]:
    with _FILE.open(newline="") as file:
        rows = [Row(**one) for one in csv.DictReader(file)]
    return {row.key: row for row in rows}


def store(rows: Iterable[Row]) -> None:
    with _FILE.open("w", newline="") as file:
        writer = csv.DictWriter(file, [one.name for one in fields(Row)], lineterminator="\n")
        writer.writeheader()
        for row in sorted(rows, key=lambda row: row.key):
            plain = asdict(row)
            writer.writerow({k: f"{v:.5f}" if type(v) is float else v for k, v in plain.items()})


Term = tuple[int, str, str, int]  # sign, column, kind, context


def table(rows: dict[Key, Row]) -> str:
    """A line for each quantity of which a seed has all runs."""
    lines: list[str] = []

    def tell(what: str, *terms: Term, biased: int = 0) -> None:
        """The sum of some terms, of which the first `biased` are of runs with the gate's bias."""
        values = []
        for seed in _SEEDS:
            found = [
                _found(rows, term, seed, "long_memory" if number < biased else "plain")
                for number, term in enumerate(terms)
            ]
            values.append(math.fsum(found))
        values = [value for value in values if math.isfinite(value)]
        if values:
            error = standard_error(values)
            lines.append(f"{what:64} {fmean(values):+8.4f} ± {error:.4f}  ({len(values)} seeds)")

    for kind in KINDS:
        for c in CONTEXTS:
            tell(f"validation loss, {kind}, {c}", (1, "validation", kind, c))
    for kind in KINDS[1:]:
        for name in ("validation", "sequences"):
            for c in CONTEXTS:
                what = f"1, 4: gap to softmax, {name}, {kind}, {c}"
                tell(what, (1, name, kind, c), (-1, name, "softmax", c))
        tell(
            f"1, 4: gap at 2,048 minus gap at 128, sequences, {kind}",
            *((1, "sequences", kind, 2048), (-1, "sequences", "softmax", 2048)),
            *((-1, "sequences", kind, 128), (1, "sequences", "softmax", 128)),
        )
    for c in CONTEXTS:
        last = "last_tenth"
        tell(f"2: gated minus sympow, {last}, {c}", (1, last, _GATED, c), (-1, last, "sympow", c))
        for name in ("first_tenth", "second_tenth", last):
            what = f"3: conformal minus gated, {name}, {c}"
            tell(what, (1, name, _CONFORMAL, c), (-1, name, _GATED, c))
    for kind in KINDS:
        what = f"5: loss at 4,096 to 8,192 minus at 256 to 512, {kind}"
        tell(what, (1, "beyond", kind, 512), (-1, "within", kind, 512))
    what = "6: conformal minus gated at 4,096 to 8,192"
    tell(what, (1, "beyond", _CONFORMAL, 512), (-1, "beyond", _GATED, 512))
    for kind in (_GATED, _CONFORMAL):
        for name in ("last_tenth", "validation"):
            what = f"bias minus none, {name}, {kind}, 512"
            tell(what, (1, name, kind, 512), (-1, name, kind, 512), biased=1)
    return "\n".join(lines)


def _found(rows: dict[Key, Row], term: Term, seed: int, gate_init: str) -> float:
    """A term's value; NaN where its run is not there."""
    sign, name, kind, context = term
    row = rows.get((kind, gate_init if kind in (_GATED, _CONFORMAL) else "", context, seed))
    return math.nan if row is None else sign * getattr(row, name)


def main(folders: Iterable[Path]) -> None:
    rows = stored()
    found = [row for folder in folders if (row := collected(folder)) is not None]
    if found:
        rows |= {row.key: row for row in found}
        store(rows.values())
    print(table(rows))


if __name__ == "__main__":
    main(sorted(Path(sys.argv[1]).iterdir()) if sys.argv[1:] else [])
