"""Train kinds in Llama's block at equal parameters, as the first table of docs/kinds.md has them.

    python -P docs/scripts/kinds_table.py FOLDER KIND...

Each kind runs with three rates and one seed, and with further rates while the best is the lowest or
the highest. The best rate runs with three seeds, as does softmax. FOLDER holds data/stdlib, which
`longhaul prepare text stdlib data/stdlib` writes, and gets the runs. Losses are kept in its
losses.json, so that a call goes on where another one ended.
"""

import json
import math
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

from longhaul.configs import load_run_config
from longhaul.datamodules.files.atomic import write_atomically
from longhaul.modules.meta_device import build_on_meta

SETTINGS = (
    "model.layers=3", "model.width=96", "model.heads=3", "model.embedding_norm=false",
    "model.norm=rms", "model.mlp=swiglu", "data.validation_tokens=131072",
    "optim.tokens_per_update=4096",
    "optim.schedule.warmup_tokens=81920", "optim.schedule.decay_tokens=327680",
    "trainer.max_tokens=819200", "trainer.validate_every_tokens=819200",
    "checkpoint.every_tokens=819200", "root=runs",
)  # fmt: skip
PARAMETERS = 363_168  # of softmax with an MLP of width 256
RATES = tuple(5e-4 * 2**n for n in range(8))
SEEDS = (0, 1, 2)
SOFTMAX_RATE = 2e-3


def kind_settings(kind: str) -> list[str]:
    """The kind, and the width of the MLP that gives the model as many parameters as softmax."""

    def settings(width: int) -> list[str]:
        return [f"model.attention={{kind: {kind}}}", f"model.mlp_width={width}"]

    config = load_run_config("run/demo.yaml", [*SETTINGS, *settings(256)])
    missing = PARAMETERS - build_on_meta(config.model).num_parameters()
    return settings(256 + round(missing / (3 * config.model.width * config.model.layers)))


class Runs:
    """Losses of the runs in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = folder / "losses.json"
        self._losses: dict[str, float] = (
            json.loads(self._file.read_text()) if self._file.exists() else {}
        )

    def loss(self, kind: str, rate: float, seed: int) -> float:
        """The validation loss after training, in nats per token."""
        name = f"{kind}-{rate:g}-{seed}"
        if name not in self._losses:
            own = [f"name={name}", f"optim.learning_rate={rate:g}", f"trainer.seed={seed}"]
            command = [str(Path(sys.executable).with_name("longhaul")), "train", "run/demo.yaml"]
            run = subprocess.run(
                [*command, *SETTINGS, *kind_settings(kind), *own],
                cwd=self._folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True,
                text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            self._losses[name] = float(re.findall(r"validation loss ([\d.]+)", run.stdout)[-1])
            write_atomically(self._file, json.dumps(self._losses, indent=1))
            print(f"{name}: {self._losses[name]}", flush=True)
        return self._losses[name]

    def best_rate(self, kind: str) -> float:
        """The rate of the lowest loss with seed 0, which is not at an end of those that ran."""
        first, last = 2, 4  # of RATES
        while True:
            ran = range(first, last + 1)
            best = min(ran, key=lambda n: self.loss(kind, RATES[n], SEEDS[0]))
            if best == first > 0:
                first -= 1
            elif best == last < len(RATES) - 1:
                last += 1
            else:
                return RATES[best]


def mean_and_error(values: list[float]) -> str:
    error = statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.mean(values):.3f} ± {error:.3f}"


def main(folder: str, *kinds: str) -> None:
    runs = Runs(Path(folder))
    softmax = [runs.loss("softmax", SOFTMAX_RATE, seed) for seed in SEEDS]
    print(f"| `softmax` | {SOFTMAX_RATE:g} | {mean_and_error(softmax)} | |", flush=True)
    for kind in kinds:
        rate = runs.best_rate(kind)
        losses = [runs.loss(kind, rate, seed) for seed in SEEDS]
        less = [loss - other for loss, other in zip(losses, softmax, strict=True)]
        print(
            f"| `{kind}` | {rate:g} | {mean_and_error(losses)} | {mean_and_error(less)} |",
            flush=True,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
