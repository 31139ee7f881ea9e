"""Models on the meta device have the shapes of others, and torch is asked to draw nothing."""

import pytest
from torch import nn

from longhaul.modules.attention import attention_config
from longhaul.modules.language_model import LanguageModel
from longhaul.modules.language_model_config import LanguageModelConfig
from longhaul.modules.meta_device import build_on_meta


def test_shapes_are_there_and_nothing_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    config = LanguageModelConfig(
        attention=attention_config("conformal_sympow")(),
        layer_attention={"1": attention_config("gated_deltanet")()},
        layers=2,
        width=32,
        heads=2,
        vocabulary=24,
        biases=True,
        tied_head=False,
    )
    wanted = {name: (p.shape, p.dtype) for name, p in LanguageModel(config).state_dict().items()}

    def draw(*_: object, **__: object) -> None:
        raise AssertionError("torch imports its compiler for this on the meta device")

    monkeypatch.setattr(nn.init, "_no_grad_normal_", draw)
    found = build_on_meta(config).state_dict()
    assert {name: (p.shape, p.dtype) for name, p in found.items()} == wanted
    assert all(p.is_meta for p in found.values())
