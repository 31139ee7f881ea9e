"""Sequences of associative recall against a plain dict, and who can solve them."""

import csv
import json
from typing import Any, cast

import pytest
import torch

from longhaul.modules.attention import attention_config
from longhaul.modules.language_model import LanguageModel
from longhaul.modules.language_model_config import LanguageModelConfig
from longhaul.pipeline.evaluation.figures import clustered_interval, wilson_interval
from longhaul.pipeline.evaluation.tasks.recall import RecallBatch, count_recalled, make_recall

Run = Any  # conftest.RunFolder: modules of this folder cannot import each other
KEYS, VALUES, BOS = torch.arange(1, 17), torch.arange(17, 33), 0


def batch_of(num_pairs: int, count: int, seed: int) -> RecallBatch:
    generator = torch.Generator().manual_seed(seed)
    return make_recall(KEYS, VALUES, num_pairs=num_pairs, count=count, generator=generator)


@pytest.mark.parametrize("num_pairs", [1, 4, 16])
def test_what_follows_a_query_is_what_a_dict_remembers(num_pairs: int) -> None:
    tokens, is_query = batch_of(num_pairs, 20, 3)
    assert tokens.shape == is_query.shape == (20, 4 * num_pairs)
    for row, asked in zip(tokens.tolist(), is_query.tolist(), strict=True):
        memory = dict(zip(row[: 2 * num_pairs : 2], row[1 : 2 * num_pairs : 2], strict=True))
        assert len(memory) == num_pairs
        assert set(memory) <= set(KEYS.tolist())
        assert set(memory.values()) <= set(VALUES.tolist())
        queries = [index for index, is_one in enumerate(asked) if is_one]
        assert sorted(row[index] for index in queries) == sorted(memory)
        assert all(memory[row[index]] == row[index + 1] for index in queries)
        assert min(queries) >= 2 * num_pairs


def test_sequences_depend_on_the_seed_alone() -> None:
    assert torch.equal(batch_of(8, 5, 1).tokens, batch_of(8, 5, 1).tokens)
    assert not torch.equal(batch_of(8, 5, 1).tokens, batch_of(8, 5, 2).tokens)
    with pytest.raises(ValueError, match="num_pairs: found 17, wanted 1 to 16"):
        batch_of(17, 5, 1)


class Recaller(torch.nn.Module):
    """Says after each token what last followed it; only of the first `memory` pairs, a 0 else."""

    def __init__(self, memory: int) -> None:
        super().__init__()
        self.memory = memory
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def activations(self, tokens: torch.Tensor) -> tuple[torch.Tensor, None]:
        told = torch.zeros_like(tokens)
        for row, given in enumerate(tokens.tolist()):
            assert given[0] == BOS
            seen: dict[int, int] = {}
            for position in range(1, len(given)):
                told[row, position] = seen.get(given[position], 0)
                if position % 2 == 0 and len(seen) < self.memory:
                    seen[given[position - 1]] = given[position]
        return torch.nn.functional.one_hot(told, 40).float(), None

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def test_accuracy_counts_queries_and_nothing_else() -> None:
    batch = batch_of(8, 10, 0)
    for memory, share in ((8, 1.0), (2, 0.25), (0, 0.0)):
        model = cast(LanguageModel, Recaller(memory))
        right = count_recalled(model, batch, BOS, 40, "32-true")
        assert right.tolist() == [8 * share] * 10


@pytest.mark.soak
def test_softmax_solves_recall_in_a_short_run() -> None:
    torch.manual_seed(0)
    softmax = attention_config("softmax")
    config = LanguageModelConfig(
        # The first layer is to look one token back, the second at tokens wherever they stand. At
        # the usual rates of rotation 3,000 updates did not teach them that.
        attention=softmax(rotary_base=1e6),
        layer_attention={"0": softmax(rotary_base=2.0)},
        layers=2,
        width=64,
        heads=1,
        vocabulary=64,
    )
    model = LanguageModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    with torch.no_grad():
        for parameter in model.parameters():
            # 0.02 is made for models ten times as wide.
            parameter *= 3.0 if parameter.ndim == 2 else 1.0
    unseen = batch_of(8, 100, 1_000_000)
    for step in range(1500):
        tokens, is_query = batch_of(8, 32, step)
        given = torch.cat([torch.full((32, 1), BOS), tokens[:, :-1]], dim=1)
        hidden, _ = model.activations(given)
        told = is_query.roll(1, dims=1)
        loss = model.head(hidden[told], tokens[told])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 49:
            share = int(count_recalled(model, unseen, BOS, 33, "32-true").sum()) / 800
            if share > 0.95:
                break
    print(f"{step + 1} updates of 32 sequences: {share:.1%} recalled")
    assert share > 0.9


def test_recall_is_measured_on_a_run(uninterrupted: Run) -> None:
    uninterrupted.longhaul("evaluate", "small", "--tasks", "recall", "--prompts", "3")
    folder = uninterrupted.path / "small" / "evaluation" / "step-000000030"
    rows = list(csv.DictReader((folder / "recall.csv").open()))
    assert [int(row["pairs"]) for row in rows][:3] == [4, 8, 16]
    assert [int(row["queries"]) for row in rows][:3] == [12, 24, 48]
    for row in rows:
        assert float(row["low"]) <= float(row["accuracy"]) <= float(row["high"])
    values = json.loads((folder / "results.json").read_text())
    assert 0 <= values["evaluation/recall_000004"] <= 1
    assert (folder / "recall.png").read_bytes().startswith(b"\x89PNG")


def test_the_interval_is_as_wide_as_sequences_differ() -> None:
    """Where a sequence is recalled as a whole or not at all, it says as much as one answer."""
    whole = [1.0] * 10 + [0.0] * 10
    low, high = wilson_interval(9.5, 19)  # 19, since the variance is estimated from the shares
    assert clustered_interval(whole, 64) == pytest.approx((low, high))
    # Over all 1,280 queries, the interval would be a sixth of it.
    one, other = wilson_interval(640, 1280)
    assert high - low > 6 * (other - one)
    # Sequences that differ as independent answers would: close to the interval of all answers.
    generator = torch.Generator().manual_seed(0)
    shares = torch.rand(200, 50, generator=generator).lt(0.3).double().mean(dim=1).tolist()
    right = round(sum(shares) * 50)
    low, high = clustered_interval(shares, 50)
    assert (low, high) == pytest.approx(wilson_interval(right, 10_000), abs=2e-3)
    assert clustered_interval([1.0] * 20, 64) == wilson_interval(20, 20)
    assert clustered_interval([0.5], 64) == wilson_interval(0.5, 1)
