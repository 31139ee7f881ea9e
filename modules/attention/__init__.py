"""Attention variants. Every module of this folder is imported, so that one file adds a variant."""

import importlib
import pkgutil

from longhaul.modules.attention.base import (
    Attention,
    AttentionConfig,
    attention_config,
    build_attention,
    registered_variants,
)

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)

__all__ = [
    "Attention",
    "AttentionConfig",
    "attention_config",
    "build_attention",
    "registered_variants",
]
