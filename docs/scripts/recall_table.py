"""Train kinds whose states have about equal bytes to recall pairs, as docs/kinds.md has it.

    python -P docs/scripts/recall_table.py FOLDER [KIND...]

A document holds pairs of a key and a value, again and again in other orders, with the same ids as
keys as in `--tasks recall`. FOLDER gets the corpus and the runs. Losses and accuracies are kept in
its recall.json, so that a call goes on where another one ended.
"""

import csv
import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from longhaul.configs import load_run_config
from longhaul.datamodules.files.atomic import write_atomically
from longhaul.pipeline.planning.sizes import build_on_meta

IDS = 64
MOST_PAIRS = IDS // 2
BOS = 256  # of the tokenizer of bytes
TOKENS = 6_000_000
CONTEXT = 256

SETTINGS = (
    "data.manifest=data/train", "data.validation_manifest=data/validation",
    f"data.context={CONTEXT}", "data.validation_tokens=65536",
    "model.layers=2", "model.width=96", "model.embedding_norm=false",
    "model.norm=rms", "model.mlp=swiglu", "trainer.micro_batch=16",
    "optim.tokens_per_update=4096",
    "optim.schedule.warmup_tokens=204800", "optim.schedule.decay_tokens=1638400",
    "trainer.max_tokens=4096000", "trainer.validate_every_tokens=4096000",
    "checkpoint.every_tokens=4096000", "root=runs",
)  # fmt: skip
# Every kind convolves its input, since the published layer of one does.
KINDS = {
    "softmax": (3, ""),
    "sympow_gated": (12, ""),
    "power_delta": (12, ""),
    "gated_deltanet": (3, ""),
}
MLP_WIDTH = 256  # of softmax; the others get as many parameters
RATES = (2e-3, 4e-3)
SEEDS = (0, 1, 2)


def write_corpus(file: Path) -> None:
    draw = np.random.default_rng(0)
    ids = torch.randperm(IDS, generator=torch.Generator().manual_seed(0)).numpy()  # as the task's
    keys, values = ids[:MOST_PAIRS], ids[MOST_PAIRS:]
    documents = []
    written = 0
    while written < TOKENS:
        count = int(np.exp(draw.uniform(np.log(4), np.log(MOST_PAIRS + 1))))
        pairs = np.stack([draw.permutation(keys)[:count], draw.choice(values, count)], axis=1)
        orders = [draw.permutation(count) for _ in range(CONTEXT // (2 * count))]
        tokens = [[BOS], *(pairs[order].ravel() for order in orders)]
        documents.append(np.concatenate(tokens).astype(np.uint16))
        written += len(documents[-1])
    np.concatenate(documents).tofile(file)


def kind_settings(kind: str) -> list[str]:
    """The kind, and the width of the MLP that gives the model as many parameters as softmax."""

    def settings(name: str, width: int) -> list[str]:
        heads, options = KINDS[name]
        attention = f"{{kind: {name}, short_convolution: 4{options}}}"
        return [
            f"model.attention={attention}", f"model.heads={heads}", f"model.mlp_width={width}",
        ]  # fmt: skip

    def parameters(name: str) -> int:
        config = load_run_config("run/demo.yaml", [*SETTINGS, *settings(name, MLP_WIDTH)])
        return build_on_meta(config.model).num_parameters()

    missing = parameters("softmax") - parameters(kind)
    return settings(kind, MLP_WIDTH + round(missing / (3 * 96 * 2)))


class Runs:
    """Accuracies of the runs in a folder, by pairs in a sequence."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = folder / "recall.json"
        self._found: dict[str, dict[str, float]] = (
            json.loads(self._file.read_text()) if self._file.exists() else {}
        )

    def longhaul(self, *arguments: str) -> str:
        command = [str(Path(sys.executable).with_name("longhaul")), *arguments]
        return subprocess.run(
            command, cwd=self._folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True,
            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        ).stdout  # fmt: skip

    def accuracy(self, kind: str, rate: float, seed: int) -> dict[str, float]:
        """The share of values that are recalled, by pairs in a sequence, and the loss as "loss"."""
        name = f"{kind}-{rate:g}-{seed}"
        if name not in self._found:
            own = [f"name={name}", f"optim.learning_rate={rate:g}", f"trainer.seed={seed}"]
            told = self.longhaul("train", "run/demo.yaml", *SETTINGS, *kind_settings(kind), *own)
            run = Path("runs", name)
            self.longhaul("evaluate", str(run), "--tasks", "recall", "--prompts", "200")
            (table,) = (self._folder / run).rglob("recall.csv")
            with table.open() as file:
                found = {row["pairs"]: float(row["accuracy"]) for row in csv.DictReader(file)}
            found["loss"] = float(re.findall(r"validation loss ([\d.]+)", told)[-1])
            self._found[name] = found
            write_atomically(self._file, json.dumps(self._found, indent=1))
            print(f"{name}: {found}", flush=True)
        return self._found[name]


def main(folder: str, *kinds: str) -> None:
    runs = Runs(Path(folder))
    if not (Path(folder) / "data").exists():
        write_corpus(Path(folder) / "pairs.bin")
        runs.longhaul(
            *("prepare", "tokens", "pairs.bin", "data", "--tokenizer", "bytes"),
            *("--raw", "uint16", "--separator", "before", "--doc-tokens", "4096"),
        )
    for kind in kinds or KINDS:
        rate = min(RATES, key=lambda rate: runs.accuracy(kind, rate, SEEDS[0])["loss"])
        every = [runs.accuracy(kind, rate, seed) for seed in SEEDS]
        cells = [
            f"{statistics.mean(values):.3f} ± {statistics.stdev(values) / len(values) ** 0.5:.3f}"
            for values in ([one[name] for one in every] for name in every[0])
        ]
        print(" | ".join([f"| `{kind}`", f"{rate:g}", *cells, ""]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
