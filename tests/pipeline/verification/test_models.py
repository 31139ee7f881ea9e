"""Checks of models, on a CPU, where steps are not recorded."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from longhaul.modules.attention import attention_config, registered_variants
from longhaul.pipeline.generation.steps import Steps
from longhaul.pipeline.verification.check import Place
from longhaul.pipeline.verification.models import (
    Step,
    check_decoding,
    decoding_checks,
    small_model,
)

PLACE = Place("cpu", Path())
LINEAR = [kind for kind in registered_variants() if attention_config(kind).cost == "linear"]


def test_every_kind_of_linear_cost_is_checked() -> None:
    names = [check.name for check in decoding_checks()]
    assert names[0] == "decoding, conformal_sympow, 12 layers of 768"
    assert len(names) == len(set(names)) == 1 + len(LINEAR)


def test_steps_that_differ_are_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    decoding = replace(small_model("retention"), layers=1, width=32)
    assert check_decoding(decoding, PLACE)["faults"] == []
    call = Steps.__call__

    def stale(self: Steps, tokens: torch.Tensor, state: list[object]) -> object:
        return call(self, torch.zeros_like(tokens), state)

    monkeypatch.setattr(Steps, "__call__", stale)
    (fault,) = check_decoding(decoding, PLACE)["faults"]
    assert fault.startswith("logits: found ")


def test_a_step_of_a_model_is_timed_and_its_losses_are_looked_at() -> None:
    model = replace(small_model("softmax"), layers=1, width=32, vocabulary=320)
    found = Step(model=model, context=64, batch=2).measure(torch.device("cpu"))
    assert found["faults"] == []
    assert found["tokens_per_second"] == pytest.approx(128e3 / found["ms"])
