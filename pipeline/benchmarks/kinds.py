"""Trains every attention kind on the same data, with the same optimizer and budget, for one table.

First the trainer itself is measured with the same config (trainer.py).
"""

import math
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from longhaul.configs import ConfigError, RunConfig
from longhaul.configs.loader import flatten, to_dict
from longhaul.datamodules.corpus import corpus_of
from longhaul.datamodules.files.atomic import write_atomically
from longhaul.modules.attention import registered_variants
from longhaul.modules.language_model import LanguageModel
from longhaul.modules.meta_device import build_on_meta
from longhaul.pipeline.benchmarks import trainer
from longhaul.pipeline.benchmarks.bare_loop import synchronized_time
from longhaul.pipeline.evaluation.tasks.bigram import bigram_loss, count_bigrams
from longhaul.pipeline.evaluation.windows import validation_batches
from longhaul.pipeline.planning.sizes import (
    allocated_bytes,
    attention_layers,
    state_bytes,
)
from longhaul.pipeline.runs.folder import RunFolder, load_run, stored_config
from longhaul.pipeline.system.environment import describe_environment
from longhaul.pipeline.terminal.numbers import in_bytes
from longhaul.pipeline.tracking.metrics_journal import read_lines

_DEFAULTS = ("root=runs/bench", "tracking.experiment=bench")
_DECIDED_HERE = {
    "name": "no value, since every row has its own name",
    "trainer.max_tokens": "--updates",
    "model.attention.kind": "--kinds",
}
# Settings in which a row must agree with a run of the same name from an earlier call.
_COMPARED = ("model.", "data.", "optim.", "trainer.")
# Not the script `longhaul`, which may be absent from the PATH or belong to another checkout.
_LONGHAUL = "import sys; from longhaul.pipeline.cli import main; sys.exit(main())"
_ROUNDS = 5


@dataclass(frozen=True)
class _Row:
    """A row of the table: a run whose attention has the kind and options in `text`."""

    text: str
    arguments: list[str]  # of `longhaul train`
    config: RunConfig  # loaded from them

    @property
    def folder(self) -> RunFolder:
        return RunFolder.of(self.config)


@dataclass(frozen=True)
class _Outcome:
    """The result of a row's training."""

    loss: float  # on the validation samples after the last update, nats per token
    verdict: str  # "below" if the loss is finite and below a bigram model's, else the reason


def run(path: str, overrides: Sequence[str], kinds: Sequence[str] | None, updates: int) -> None:
    """Measure the trainer, train all unfinished rows, print the table and write it to the root.

    Args:
        path: of the config.
        overrides: of the config.
        kinds: the rows, each `kind:option=value,...`; None means all kinds.
        updates: that each row is trained for.

    A row whose loss is not finite, or not below a bigram model's, says so: that is a result too.
    """
    kinds = registered_variants() if kinds is None else kinds
    rows = _rows(path, overrides, kinds, updates)
    own = load_run(path, [*_DEFAULTS, *overrides])
    if not rows:
        trainer.run(own)
        return
    config = rows[0].config
    baseline = _bigram_loss(config)  # first, since it also notices missing data
    if own.trainer.strategy == "single":
        trainer.run(own)
    for number, row in enumerate(rows, start=1):
        print(f"row {number} of {len(rows)}: {row.folder.path}", flush=True)
        _train(row)
    outcomes = [_outcome(row, baseline) for row in rows]
    header = _header([path, *overrides], config, updates, baseline)
    table = f"{header}\n\n{_table(rows, outcomes, _speeds(rows))}\n"
    file = Path(config.root) / f"TABLE-{config.trainer.precision}.md"
    file.parent.mkdir(parents=True, exist_ok=True)  # no row may have begun
    write_atomically(file, table)
    print(f"\n{table}\nwritten: {file}", flush=True)
    others = [
        f"{row.text} ({outcome.verdict})"
        for row, outcome in zip(rows, outcomes, strict=True)
        if outcome.verdict != "below"
    ]
    if others:
        print(f"{len(others)} of {len(rows)} rows are not below the bigram: {', '.join(others)}")


def _rows(path: str, overrides: Sequence[str], kinds: Sequence[str], updates: int) -> list[_Row]:
    """All rows, checked before the first one is trained."""
    if updates < 1:
        raise ValueError(f"--updates: found {updates}, wanted 1 or more")
    for override in overrides:
        key = override.partition("=")[0]
        if key in _DECIDED_HERE and (kinds or key != "model.attention.kind"):
            raise ValueError(f"{key}: found {override!r}, wanted {_DECIDED_HERE[key]}")
    rows = [_row(path, overrides, text, updates) for text in dict.fromkeys(kinds)]
    for row in rows:
        _check_same_budget(row)
    return rows


def _row(path: str, overrides: Sequence[str], text: str, updates: int) -> _Row:
    kind, colon, options = text.partition(":")
    chosen = [f"kind={kind}", *(options.split(",") if colon else [])]
    arguments = [path, *_DEFAULTS, *overrides, *(f"model.attention.{each}" for each in chosen)]
    config = load_run(path, arguments[1:])
    name = "-".join(["bench", *re.split("[:,=]", text), config.trainer.precision])
    max_tokens = updates * config.optim.tokens_per_update
    arguments += [f"name={name}", f"trainer.max_tokens={max_tokens}"]
    return _Row(text, arguments, load_run(path, arguments[1:]))


def _check_same_budget(row: _Row) -> None:
    """Refuse a row whose run exists from an earlier call with another budget or other data."""
    file = row.folder.config_file
    if not file.exists():
        return
    before, now = (flatten(to_dict(each)) for each in (stored_config(row.folder), row.config))
    for key in sorted(before.keys() | now.keys()):
        if key.startswith(_COMPARED) and before.get(key) != now.get(key):
            raise ConfigError(
                f"{key}: found {now.get(key)!r}, wanted {before.get(key)!r} as in {file}; for "
                "another table set another root=FOLDER"
            )


def _bigram_loss(config: RunConfig) -> float:
    validation = validation_batches(config, corpus_of(config.data))
    return bigram_loss(count_bigrams(config.data), validation)


def _train(row: _Row) -> None:
    """Train a row in its own process, so that all rows start with the same memory and RNG."""
    finished = row.folder.finished()
    if finished is not None and finished.is_tracked:
        return
    process = subprocess.Popen([sys.executable, "-P", "-c", _LONGHAUL, "train", *row.arguments])

    def pass_on(number: int, frame: FrameType | None) -> None:
        process.send_signal(number)

    previous = signal.signal(signal.SIGTERM, pass_on)
    try:
        status = process.wait()
    except KeyboardInterrupt:
        # A terminal's Ctrl-C has reached the run as well, which records how it ended.
        process.wait()
        raise
    finally:
        signal.signal(signal.SIGTERM, previous)
    # Status 1 is a failed run, for example with gradients that were not finite: that is a result.
    if status not in (0, 1):
        raise RuntimeError(f"{row.folder.path}: training ended with status {status}, wanted 0")


def _outcome(row: _Row, baseline: float) -> _Outcome:
    if row.folder.finished() is None:
        return _Outcome(math.nan, "stopped")
    losses: dict[str, float] = {}
    skipped, is_finite = 0, True
    for line in _journal(row.folder.path / "logs" / "metrics.jsonl"):
        if line["kind"] in ("train", "validation"):
            values = {name: float(value) for name, value in line["values"].items()}
            losses[line["kind"]] = values[f"curves/{line['kind']}_loss"]
            is_finite = is_finite and all(map(math.isfinite, losses.values()))
            skipped = int(values.get("train/skipped_updates", skipped))
    loss = losses["validation"]
    if skipped:
        return _Outcome(loss, f"{skipped} updates skipped")
    if not is_finite:
        return _Outcome(loss, "not finite")
    return _Outcome(loss, "below" if loss < baseline else "ABOVE")


def _journal(path: Path) -> Iterator[dict[str, Any]]:
    offset, end = -1, 0
    while offset != end:
        offset = end
        lines, end = read_lines(path, offset)
        yield from lines


def _speeds(rows: Sequence[_Row]) -> list[float]:
    """Tokens/s of forward + backward of one micro-batch, best of a few rounds.

    Rows take turns, so that a noisy minute affects all: ratios mean more than the speeds.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    models = [LanguageModel(row.config.model).to(device) for row in rows]
    best = [0.0] * len(rows)
    for _ in range(_ROUNDS):
        for index, (row, model) in enumerate(zip(rows, models, strict=True)):
            best[index] = max(best[index], _speed(model, row.config, device))
    return best


def _speed(model: LanguageModel, config: RunConfig, device: torch.device) -> float:
    shape = (config.trainer.micro_batch, config.data.context)
    tokens, target = torch.randint(config.model.vocabulary, (2, *shape), device=device)
    is_half = config.trainer.precision == "bf16-mixed"
    before = synchronized_time(device)
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=is_half):
        loss = model.loss(tokens, target)
    loss.backward()
    seconds = synchronized_time(device) - before
    model.zero_grad()  # frees the gradients: those of all rows would be as large as all models
    return math.prod(shape) / seconds


def _header(given: Sequence[str], config: RunConfig, updates: int, baseline: float) -> str:
    environment = describe_environment(config.model.kinds)
    machine = ", ".join(environment["accelerators"]) or environment["processor"]
    return (
        f"{machine}, {environment['threads']} threads, torch {torch.__version__}, "
        f"{config.trainer.precision}, {' '.join(given)}: {updates:,} updates, "
        f"{config.trainer.max_tokens:,} tokens. Loss in nats per token, on the validation samples; "
        f"that of a bigram model is {baseline:.3f}. Tokens/s of forward + backward of a "
        f"micro-batch, best of {_ROUNDS} rounds taken in turns; on a CPU only their ratio means "
        f"much. State of a sequence of {config.data.context:,} tokens in bfloat16, without "
        "padding and as allocated."
    )


def _table(rows: Sequence[_Row], outcomes: Sequence[_Outcome], speeds: Sequence[float]) -> str:
    """The table in Markdown, sorted by loss."""
    kinds = [row.config.model.attention.kind for row in rows]
    peer = kinds.index("softmax") if "softmax" in kinds else 0
    lines = [
        f"| kind | loss | bigram | tokens/s | of {rows[peer].text} | state | allocated |",
        "|---|---|---|---|---|---|---|",
    ]
    order = sorted(range(len(rows)), key=lambda i: (math.isnan(outcomes[i].loss), outcomes[i].loss))
    for i in order:
        T, layers = (
            rows[i].config.data.context,
            attention_layers(build_on_meta(rows[i].config.model)),
        )
        cells = [
            f"`{rows[i].text}`",
            f"{outcomes[i].loss:.3f}",
            outcomes[i].verdict,
            f"{speeds[i]:,.0f}",
            f"{speeds[i] / speeds[peer]:.2f}",
            in_bytes(state_bytes(layers, T)),
            in_bytes(allocated_bytes(layers, T)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
