"""Attention scores before the softmax, against those written out."""

import csv
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from longhaul.modules.attention import attention_config
from longhaul.modules.language_model import LanguageModel
from longhaul.pipeline.evaluation.figures import enlarged_from
from longhaul.pipeline.evaluation.tasks import scores
from longhaul.pipeline.evaluation.tasks.attention import attention_inputs
from longhaul.pipeline.runs.trained_model import TrainedModel, load_trained_model

Run = Any  # conftest.RunFolder: modules of this folder cannot import each other


@pytest.fixture
def trained(uninterrupted: Run, request: pytest.FixtureRequest) -> TrainedModel:
    """A run's data with an untrained model of another kind."""
    loaded = load_trained_model(uninterrupted.path / "small")
    torch.manual_seed(0)
    attention = attention_config(request.param)()
    model = LanguageModel(dataclasses.replace(loaded.config.model, attention=attention))
    return dataclasses.replace(loaded, model=model.eval())


def test_layers_and_the_enlarged_end_are_the_published_ones() -> None:
    assert scores.chosen_layers(24) == [6, 12, 18, 24]
    assert scores.chosen_layers(4) == [1, 2, 3, 4]
    assert scores.chosen_layers(1) == [1]
    assert enlarged_from(1951) == 1951 - 500 + 1
    assert enlarged_from(64) == 33


def test_scores_of_later_keys_are_left_out() -> None:
    matrices = torch.tensor(
        [
            [[1.0, 99.0, 99.0], [-7.0, 2.0, 99.0], [3.0, 1.0, 0.5]],
            [[0.0, 99.0, 99.0], [6.0, -4.0, 99.0], [1.0, 5.0, -2.5]],
        ]
    )
    layer, *found = scores.layer_scores(matrices, 7)
    assert layer == 7
    mean, least, most, largest = (one.tolist() for one in found)
    assert (mean, least, most) == ([2.0, 3.0, -1.0], [1.0, 1.0, -2.5], [3.0, 5.0, 0.5])
    assert largest == [7.0, 5.0, 2.5]


@pytest.mark.parametrize(
    "trained", ["softmax", pytest.param("alibi", marks=pytest.mark.wide), "coca"], indirect=True
)
@pytest.mark.parametrize("no_bos", [False, True])
def test_a_softmax_of_the_scores_is_the_weights(
    trained: TrainedModel, no_bos: bool, tmp_path: Path
) -> None:
    options = scores.Options(no_bos=no_bos)
    scores.check(trained, options)
    result = scores.measure(trained, options, tmp_path)
    assert [file.name for file in result.files] == ["scores.csv", "scores.png", "scores_end.png"]
    rows = list(csv.DictReader((tmp_path / "scores.csv").open()))
    assert [(row["layer"], row["key"]) for row in rows] == [
        (layer, str(key)) for layer in "12" for key in range(1, 65)
    ]
    assert {row["bos"] for row in rows} == {"no" if no_bos else "yes"}
    batch = next(iter(scores.read_windows(trained, options, 64)))
    tokens = batch["target" if no_bos else "input"][:1]
    x = attention_inputs(trained.model, tokens)[1]
    with torch.no_grad():
        weights = trained.model.blocks[1].attention.weights(x)[0, :, -1]
    for row, weight, first in zip(
        rows[64:], weights.T, weights[:, :1].T.expand(64, 2), strict=True
    ):
        # Differences of scores are logarithms of ratios of weights, of each head and so of means.
        ratio = (weight / first).log().mean().item()
        difference = float(row["score"]) - float(rows[64]["score"])
        assert difference == pytest.approx(ratio, abs=1e-4)
        assert float(row["least_of_heads"]) <= float(row["score"]) <= float(row["most_of_heads"])
    largest = max(float(row["largest"]) for row in rows)
    assert result.values == {"evaluation/score_largest": pytest.approx(largest, rel=1e-5)}
    assert math.isfinite(largest)


def test_a_kind_without_a_softmax_is_refused(uninterrupted: Run) -> None:
    result = uninterrupted.longhaul("evaluate", "small", "--tasks", "scores", check=False)
    assert result.returncode == 2
    message = "attention.kind: found conformal_sympow with the task scores, wanted a kind with"
    assert result.stderr.startswith(f"longhaul: {message}")
    values = uninterrupted.path / "small" / "evaluation" / "step-000000030" / "results.json"
    assert not values.exists() or "score" not in json.dumps(json.loads(values.read_text()))
