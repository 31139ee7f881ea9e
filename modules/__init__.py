"""Attention variants, the language model, and the LightningModule that trains it."""

from longhaul.modules.attention import build_attention, registered_variants
from longhaul.modules.language_model import LanguageModel
from longhaul.modules.language_model_config import LanguageModelConfig

__all__ = ["LanguageModel", "LanguageModelConfig", "build_attention", "registered_variants"]
