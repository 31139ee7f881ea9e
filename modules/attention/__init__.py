"""Attention variants. Every module of this folder is imported, so that one file adds a variant."""

from longhaul.modules.attention.base import (
    Attention,
    AttentionConfig,
    LayerShape,
    attention_config,
    build_attention,
    left_out,
    registered_variants,
)
from longhaul.modules.attention.variant_files import import_variants

import_variants(__name__, __path__)

__all__ = [
    "Attention",
    "AttentionConfig",
    "LayerShape",
    "attention_config",
    "build_attention",
    "left_out",
    "registered_variants",
]
