"""The tables of all architectures."""

from longhaul.modules.language_model_config import LanguageModelConfig
from longhaul.pipeline.architectures.architecture import Architecture
from longhaul.pipeline.architectures.gpt import GPT2, GPT_NEOX
from longhaul.pipeline.architectures.hybrids import OLMO_HYBRID
from longhaul.pipeline.architectures.llama import (
    GEMMA2,
    GEMMA3,
    LLAMA,
    OLMO2,
    OLMO3,
    QWEN2,
    QWEN3,
    SMOLLM3,
    STARCODER2,
)
from longhaul.pipeline.architectures.mamba import MAMBA2

ARCHITECTURES = {
    one.model_type: one
    for one in (
        GPT2,
        *(LLAMA, QWEN2, QWEN3, OLMO2, OLMO3, GEMMA2, GEMMA3, SMOLLM3, GPT_NEOX, STARCODER2),
        *(OLMO_HYBRID, MAMBA2),
    )
}
"""By the `model_type` of config.json."""


def architecture_of(model: LanguageModelConfig) -> Architecture | None:
    """The first architecture that expresses a model, and that is written."""
    for one in ARCHITECTURES.values():
        if one.cut:
            continue
        try:
            one.config_of(model)
        except ValueError:
            continue
        return one
    return None
