"""Weights in bfloat16, against those in float32."""

import pytest
import torch

from longhaul.modules.attention import attention_config, registered_variants
from longhaul.modules.attention.base import float32_weights
from longhaul.modules.language_model import LanguageModel
from longhaul.modules.language_model_config import LanguageModelConfig
from longhaul.pipeline.generation.run import round_weights


@pytest.mark.parametrize("kind", registered_variants())
def test_weights_in_bfloat16_change_logits_by_their_rounding(kind: str) -> None:
    torch.manual_seed(0)
    config = LanguageModelConfig(
        attention=attention_config(kind)(), layers=2, width=32, heads=2, vocabulary=64
    )
    model = LanguageModel(config).eval()
    tokens = torch.randint(64, (1, 20))
    exact, _ = model.prefill(tokens)
    round_weights(model)
    kept = float32_weights(model)
    for weight in model.parameters():
        assert weight.dtype == (torch.float32 if weight in kept else torch.bfloat16)
    _, state = model.prefill(tokens[:, :-1])
    rounded, _ = model.step(tokens[:, -1], state)
    error = (rounded - exact).norm() / exact.norm()
    assert 2**-10 < error < 2**-6
