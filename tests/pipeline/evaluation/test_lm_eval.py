"""lm_eval on exported checkpoints: the bundled task, and what it finds, by a plain loop."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from longhaul.pipeline.evaluation.task import Options
from longhaul.pipeline.evaluation.tasks import lm_eval, lm_eval_task
from longhaul.pipeline.runs.trained_model import load_trained_model

Run = Any  # conftest.RunFolder: modules of this folder cannot import each other
PAIRS = [
    json.loads(line)
    for line in Path(lm_eval_task.__file__)
    .with_name("longhaul_pairs.jsonl")
    .read_text()
    .splitlines()
]


@pytest.fixture(scope="module")
def base(make_run: Callable[[int], Run]) -> Run:
    """A finished run of a few updates."""
    run = make_run(8)
    run.longhaul("train", "small.yaml")
    return run


def test_the_bundled_pairs_have_one_right_answer_each_and_none_stands_out_by_its_place() -> None:
    assert len({json.dumps(pair) for pair in PAIRS}) == len(PAIRS) == 80
    assert sum(pair["answer"] for pair in PAIRS) == 40
    for pair in PAIRS:
        assert len(set(pair["choices"])) == 2
        assert pair.keys() == {"context", "choices", "answer"}


def test_names_of_metrics_are_those_that_mlflow_takes() -> None:
    results = {
        "a": {"alias": "a", "sample_len": 80, "acc,none": 0.5, "acc_stderr,none": "N/A"},
        "b": {"exact_match,strict-match": 1, "exact_match,none": 0},
    }
    assert lm_eval._numbers(results) == {
        "a/acc": 0.5,
        "b/exact_match/strict-match": 1.0,
        "b/exact_match": 0.0,
    }


def test_what_it_cannot_run_is_refused(base: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.find_spec("json")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="lm-eval without the package lm_eval, wanted it"):
        lm_eval.check(load_trained_model(base.path / "small"), Options())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    scaled = load_trained_model(base.path / "small", "linear", 2.0)
    with pytest.raises(ValueError, match="--positions: found linear with lm-eval, wanted none"):
        lm_eval.check(scaled, Options())


@pytest.mark.soak
@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm_eval is not installed")
def test_the_harness_finds_what_a_plain_loop_finds(
    base: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    trained = load_trained_model(base.path / "small")
    context, right = 128, {"acc": 0, "acc_norm": 0}
    for pair in PAIRS:
        sums = []
        for choice in pair["choices"]:
            text, added = pair["context"].encode(), choice.encode()
            tokens = torch.tensor([[256, *text, *added]])[:, -context - 1 :]
            hidden, _ = trained.model.activations(tokens[:, :-1])
            logs = (hidden[0] @ trained.model.embedding.weight.T).log_softmax(-1)
            own = logs.gather(1, tokens[0, 1:, None])[-len(added) :]
            sums.append((own.sum().item(), own.sum().item() / len(choice)))
        for place, metric in enumerate(right):
            best = max((0, 1), key=lambda index: sums[index][place])
            right[metric] += best == pair["answer"]
    given = ("evaluate", "small", "--tasks", "lm-eval", "--context", str(context))
    result = base.longhaul(*given)
    folder = base.path / "small" / "evaluation" / "step-000000008-context-128"
    record = json.loads((folder / "lm-eval.json").read_text())
    prefix = "evaluation/context-128/lm-eval/longhaul_pairs"
    for metric, count in right.items():
        assert record["values"][f"{prefix}/{metric}"] == count / len(PAIRS), metric
    assert f"{prefix}/acc" in result.stdout
    assert record["options"] == {"context": context, "lm_eval_tasks": ["longhaul_pairs"]}
    harness = json.loads((folder / "lm-eval-results.json").read_text())
    assert harness["n-samples"]["longhaul_pairs"]["effective"] == len(PAIRS)
    assert "results are already there" in base.longhaul(*given).stdout
    refused = base.longhaul(*given, "--lm-eval-tasks", "longhaul_pairs,no_such", check=False)
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1].startswith("longhaul: --lm-eval-tasks: found no_such,")
