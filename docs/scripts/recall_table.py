"""Train kinds to recall the values of keys, for the table of recall in docs/kinds.md.

    python -P docs/scripts/recall_table.py FILE [ROW...]

A sequence holds pairs of a key and a value, then the same pairs in another order, and the loss is
that of the second values alone. Models have two layers, equal parameters within 0.1 %, and a
convolution over 4 tokens in every kind. Each row runs with all rates and the first seed, then with
the rate that recalls most and the other seeds. Results are kept in FILE, so that a call goes on
where another one ended.
"""

import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from longhaul.configs import RunConfig, load_run_config
from longhaul.datamodules.files.atomic import write_atomically
from longhaul.modules.language_model import LanguageModel
from longhaul.modules.meta_device import build_on_meta
from longhaul.modules.optim import build_optimizer, learning_rate_factor, set_learning_rate
from longhaul.pipeline.evaluation.tasks.recall import RecallBatch, count_recalled, make_recall
from longhaul.pipeline.evaluation.windows import shifted
from longhaul.pipeline.planning.sizes import attention_layers, state_bytes

IDS = 64  # of keys; there are as many values, and the bos id
KEYS, VALUES, BOS = torch.arange(IDS), torch.arange(IDS, 2 * IDS), 2 * IDS
PAIRS = (4, 8, 16, 32, 64)
RATES = (2e-3, 4e-3, 8e-3, 16e-3)
SEEDS = (0, 1, 2)
TESTED = 128  # sequences of each number of pairs
TOKENS, UPDATES = 4096, 1500
SETTINGS = (
    "model.layers=2", "model.width=96", "model.embedding_norm=false",
    "model.norm=rms", "model.mlp=swiglu",
    "model.tied_head=false", "model.init=llama", f"optim.tokens_per_update={TOKENS}",
    f"trainer.max_tokens={TOKENS * UPDATES}", f"optim.schedule.warmup_tokens={50 * TOKENS}",
    f"optim.schedule.decay_tokens={UPDATES // 4 * TOKENS}",
)  # fmt: skip
PARAMETERS = 285_408  # of softmax with an MLP of width 256
ROWS = {
    "softmax": ("softmax", 3),
    "power_delta, 12 heads of 8": ("power_delta", 12),
    "sympow_gated, 12 heads of 8": ("sympow_gated", 12),
    "gated_deltanet": ("gated_deltanet", 3),
}
"""Kind and number of heads."""


def row_config(row: str, rate: float) -> RunConfig:
    """With the width of the MLP that gives every row as many parameters, within 0.1 %."""
    kind, heads = ROWS[row]

    def load(width: int) -> RunConfig:
        attention = f"model.attention={{kind: {kind}, short_convolution: 4}}"
        own = [f"model.heads={heads}", f"model.mlp_width={width}", f"optim.learning_rate={rate:g}"]
        return load_run_config("run/demo.yaml", [*SETTINGS, attention, *own])

    model = load(256).model
    missing = PARAMETERS - build_on_meta(model).num_parameters()
    return load(256 + round(missing / (3 * model.width * model.layers)))


def draw(pairs: int, count: int, generator: torch.Generator) -> RecallBatch:
    return make_recall(KEYS, VALUES, num_pairs=pairs, count=count, generator=generator)


def answers_loss(model: LanguageModel, batch: RecallBatch) -> Tensor:
    """Cross-entropy of the second values, which follow their keys, in nats per value."""
    is_answer = batch.is_query.roll(1, dims=1)
    hidden, _ = model.activations(shifted(batch.tokens, BOS))
    return cross_entropy(model.head(hidden[is_answer]), batch.tokens[is_answer])


def train(config: RunConfig, seed: int) -> list[float]:
    """Train a model, and return the share of values that it recalls, for each of PAIRS."""
    torch.manual_seed(seed)
    model = LanguageModel(config.model)
    optimizer = build_optimizer(model, config.optim)
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for update in range(UPDATES):
        factor = learning_rate_factor(
            config.optim.schedule, update * TOKENS, config.trainer.max_tokens
        )
        set_learning_rate(optimizer, config.optim.learning_rate * factor)
        pairs = PAIRS[int(torch.randint(len(PAIRS), (), generator=generator))]
        loss = answers_loss(model, draw(pairs, TOKENS // (4 * pairs), generator))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if update % 100 == 99:
            print(f"  update {update + 1}: {statistics.mean(losses[-50:]):.3f}", flush=True)
    shares = []
    for pairs in PAIRS:
        batch = draw(pairs, TESTED, torch.Generator().manual_seed(1000 + pairs))
        right = count_recalled(model, batch, BOS, BOS, "32-true").sum().item()
        shares.append(right / (TESTED * pairs))
    return shares


class Runs:
    """Shares of values recalled by the runs in a file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._shares = json.loads(file.read_text()) if file.exists() else {}

    def shares(self, row: str, rate: float, seed: int) -> list[float]:
        name = f"{row}, {rate:g}, seed {seed}"
        if name not in self._shares:
            print(name, flush=True)
            self._shares[name] = train(row_config(row, rate), seed)
            write_atomically(self._file, json.dumps(self._shares, indent=1))
        return list(self._shares[name])


def mean_and_error(values: Sequence[float]) -> str:
    error = statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.mean(values):.2f} ± {error:.2f}"


def main(file: str, *rows: str) -> None:
    runs = Runs(Path(file))
    for row in rows or ROWS:
        rate = max(RATES, key=lambda rate: sum(runs.shares(row, rate, SEEDS[0])))
        of_seeds = [runs.shares(row, rate, seed) for seed in SEEDS]
        shares = [mean_and_error(one) for one in zip(*of_seeds, strict=True)]
        layers = attention_layers(build_on_meta(row_config(row, rate).model))
        state = state_bytes(layers, 4 * PAIRS[-1])
        print(f"| {row} | {rate:g} | {' | '.join(shares)} | {state / 1000:.0f} kB |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
