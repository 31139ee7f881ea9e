"""Outliers and memories of layers, against definitions written out."""

import csv
import dataclasses
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from longhaul.modules.attention import Attention, attention_config, registered_variants
from longhaul.modules.language_model import LanguageModel
from longhaul.modules.language_model_config import LanguageModelConfig
from longhaul.pipeline.evaluation.run import evaluate
from longhaul.pipeline.evaluation.tasks.attention import (
    HeadReport,
    Options,
    attention_inputs,
    half_lives,
    measure,
    over_windows,
    report_layer,
    weight_statistics,
)
from longhaul.pipeline.runs.trained_model import load_trained_model

Run = Any  # conftest.RunFolder: modules of this folder cannot import each other


def model_of(kind: str, **options: object) -> LanguageModel:
    torch.manual_seed(0)
    config = LanguageModelConfig(
        attention=attention_config(kind)(**options), layers=2, width=32, heads=2, vocabulary=64
    )
    return LanguageModel(config).eval()


def test_statistics_are_those_of_the_past_from_the_middle_on() -> None:
    rows = [[1.0, 9.0, 9.0, 9.0], [5.0, 5.0, 9.0, 9.0], [0.25, -0.75, 0.0, 9.0]]
    weights = torch.tensor([*rows, [0.5, 0.0, 0.3, 0.2]])
    largest, share, kurtosis = weight_statistics(weights)
    assert largest == 0.75
    assert share == pytest.approx((0.25 / 1.0 + 0.5 / 1.0) / 2)
    past = [0.25, 0.75, 0.0, 0.5, 0.0, 0.3, 0.2]
    mean = sum(past) / 7
    second, fourth = (sum((x - mean) ** power for x in past) / 7 for power in (2, 4))
    assert kurtosis == pytest.approx(fourth / second**2)


def test_a_gate_halves_a_memory_in_its_half_life() -> None:
    gate = 0.9
    tokens, low, high = half_lives(torch.full((5,), math.log(gate)))
    assert gate**tokens == pytest.approx(0.5)
    assert tokens == pytest.approx(low) == pytest.approx(high)
    assert half_lives(torch.zeros(5)) == (math.inf, math.inf, math.inf)


def test_gates_that_forget_rarely_are_told_from_gates_that_forget_slowly() -> None:
    gates = torch.full((101,), 0.999).log()
    gates[5::20] = math.log(0.01)
    rare, low, high = half_lives(gates)
    assert low == pytest.approx(high, rel=1e-3) == pytest.approx(692.8, rel=1e-3)
    assert rare < 5
    gates[5::5] = math.log(0.01)  # a fifth of them
    _, low, high = half_lives(gates)
    assert (low, high) == pytest.approx((0.1505, 692.8), rel=1e-3)


def test_windows_are_put_together_as_one_text_would_be() -> None:
    one = HeadReport(0, 1, 0.5, 0.2, 4.0, 10.0, 5.0, math.inf, 1.0, 0.3)
    two = HeadReport(0, 1, 0.75, 0.4, 6.0, 30.0, 5.0, 20.0, 1.2, 0.3)
    found = over_windows([one, two])
    assert found[:5] == pytest.approx((0, 1, 0.75, 0.3, 5.0))
    # Mean log gates: (1/10 + 1/30) / 2 = 1/15, and of nothing forgotten and 1/20, 1/40.
    assert (found.half_life, found.half_life_low, found.half_life_high) == pytest.approx(
        (15.0, 5.0, 40.0)
    )
    assert (found.rotation, found.rotation_spread) == pytest.approx((1.1, math.sqrt(0.1)))
    assert over_windows([one]) == pytest.approx(one)
    never, always = one._replace(half_life=math.inf), one._replace(half_life=0.0)
    assert over_windows([never, never]).half_life == math.inf
    assert over_windows([never, always]).half_life == 0


def test_a_kind_without_matrices_is_refused_by_name() -> None:
    model = model_of("softmax")
    (x, _) = attention_inputs(model, torch.randint(60, (1, 24)))
    attention = model.blocks[0].attention
    attention.weights = partial(Attention.weights, attention)
    with pytest.raises(ValueError, match="found softmax, which does not write out its attention"):
        report_layer(attention, x, 0)


@pytest.mark.parametrize("kind", registered_variants())
def test_every_kind_is_reported(kind: str) -> None:
    model = model_of(kind)
    inputs = attention_inputs(model, torch.randint(60, (1, 24)))
    assert [tuple(x.shape) for x in inputs] == [(1, 24, 32)] * 2
    for layer, x in enumerate(inputs):
        attention = model.blocks[layer].attention
        if type(attention).weights is Attention.weights:
            return  # refused, as above
        reports, weights = report_layer(attention, x, layer)
        assert len(reports) == len(weights)
        assert weights.shape[1:] == (24, 24)
        for report, matrix in zip(reports, weights, strict=True):
            assert report.largest == pytest.approx(matrix.tril()[12:].abs().max().item())
            assert 0 <= report.first_token_share <= 1
            assert report.half_life > 0
    gated = ("retention", "sympow_gated", "conformal_sympow", "cartan", "zeros", "fox", "mamba2")
    gated += ("gated_deltanet", "gated_linear", "kimi_delta", "power_delta")
    wants_gate = kind in gated
    assert math.isfinite(min(report.half_life for report in reports)) is wants_gate


def test_gates_and_rates_are_the_modules_own() -> None:
    model = model_of("conformal_sympow", gate_init="long_memory")
    (x, _) = attention_inputs(model, torch.randint(60, (1, 24)))
    attention = model.blocks[0].attention
    reports, _ = report_layer(attention, x, 0)
    normed = torch.nn.functional.linear(x[0], attention.rate.weight)
    assert reports[0].rotation == pytest.approx((1 + normed.tanh()).mean().item(), rel=1e-5)
    for head, report in enumerate(reports):
        logits = x[0, 1:] @ attention.gate.weight[head] + attention.gate.bias[head]
        wanted = math.log(0.5) / logits.sigmoid().log().mean().item()
        assert report.half_life == pytest.approx(wanted, rel=1e-4)
        # As begun: 1 - 2^(-5 - h).
        assert report.half_life == pytest.approx(math.log(2) * 2 ** (5 + head), rel=0.1)


def test_gates_of_the_parts_of_a_head_are_averaged() -> None:
    model = model_of("complex", learned_sizes=True)
    (x, _) = attention_inputs(model, torch.randint(60, (1, 24)))
    reports, _ = report_layer(model.blocks[0].attention, x, 0)
    # As begun, all 8 eigenvalues of a head have the size 1 - 2^(-5 - h).
    wanted = [math.log(0.5) / math.log(1 - 2.0 ** (-5 - head)) for head in range(2)]
    assert [report.half_life for report in reports] == pytest.approx(wanted, rel=1e-4)


def test_attention_is_reported_of_a_run(uninterrupted: Run) -> None:
    uninterrupted.longhaul("evaluate", "small", "--tasks", "attention")
    folder = uninterrupted.path / "small" / "evaluation" / "step-000000030"
    rows = list(csv.DictReader((folder / "attention.csv").open()))
    assert [(row["layer"], row["matrix"]) for row in rows] == [
        ("0", "0"),
        ("0", "1"),
        ("1", "0"),
        ("1", "1"),
    ]
    values = json.loads((folder / "results.json").read_text())
    lives = [float(row["half_life"]) for row in rows]
    for row in rows:
        assert row["windows"] == "6"  # all that there are
        assert float(row["first_token_share_standard_error"]) > 0
        assert float(row["half_life_low"]) <= float(row["half_life_high"])
    assert values["evaluation/attention_longest_half_life"] == pytest.approx(max(lives), rel=1e-4)
    for name in ("attention.png", "attention_memory.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")


def test_a_kind_without_gates_and_rates_has_no_figure_of_them(
    uninterrupted: Run, tmp_path: Path
) -> None:
    trained = load_trained_model(uninterrupted.path / "small")
    softmax = dataclasses.replace(trained.config.model, attention=attention_config("softmax")())
    trained = dataclasses.replace(trained, model=LanguageModel(softmax))
    measure(trained, Options(), tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["attention.csv", "attention.png"]


def test_a_kind_without_matrices_is_refused_before_any_task(
    uninterrupted: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = load_trained_model(uninterrupted.path / "small")
    last = trained.model.blocks[-1].attention
    last.weights = partial(Attention.weights, last)
    with pytest.raises(ValueError, match="found conformal_sympow, which does not write out its"):
        evaluate(trained, ["bigram", "attention"], {}, again=True)
    assert capsys.readouterr().out == ""
