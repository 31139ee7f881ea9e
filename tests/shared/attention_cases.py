"""Every variant with the options that change what it computes."""

import pytest
import torch
from torch import Tensor

from longhaul.modules.attention import (
    Attention,
    attention_config,
    build_attention,
    registered_variants,
)
from longhaul.modules.attention.power import PowerConfig

VARIANTS = registered_variants()
POWER = [kind for kind in VARIANTS if issubclass(attention_config(kind), PowerConfig)]
WIDTH, HEADS = 16, 2

# Options that change what a variant computes, tested besides its defaults. A new variant needs no
# entry.
OPTIONS: dict[str, list[dict[str, object]]] = {
    "cartan": [
        {"generator": "additive"},
        {"generator": "product"},
        {"negative_diagonal": True},
        {"bilinear": False},
        {"bilinear": False, "generator": "additive"},
        {"gate_init": "long_memory"},
        {"generator_per": "pair", "step_size": True},
        {"generator_per": "coordinate", "generator": "product", "lengths": "ratio"},
        {"generator_per": "pair", "bilinear": False},
        {"lengths": "raw"},
    ],
    "coca": [{"mode": "slack"}, {"longest_document": 64}],
    "complex": [
        {"decay": True},
        {"learned_rates": True, "learned_sizes": True},
        {"normalizer": "amplitudes", "decay": True},
    ],
    "conformal_sympow": [
        {"qk_norm": True},
        {"degree": 4},
        {"degree": 6},
        {"gate_init": "long_memory"},
        {"gate": "retention"},
    ],
    "linear": [
        {"feature_map": "relu"},
        {"feature_map": "identity", "normalizer": "head_norm"},
        {"rotary": "fixed", "gate": "data"},
        {
            "rotary": "fixed",
            "gate": "data",
            "feature_map": "identity",
            "normalizer": "head_norm",
        },
    ],
    "retention": [{"swish_gate": True}, {"group_norm": False}],
    "softmax": [{"longest_document": 64}],
    "sympow": [{"degree": 4}, {"degree": 8}, {"rotary": "none"}],
    "sympow_gated": [
        {"gate_init": "long_memory"},
        {"gate": "learned"},
        {"gate": "alibi", "rotary": "none"},
    ],
    "zeros": [
        {"zeroth": "first_layer"},
        {"second_order": True},
        {"ordered": True},
        {"ordered": True, "second_order": True, "zeroth": "first_layer"},
        {"ordered": True, "gate_init": "long_memory"},
        {"form": "notes"},
        {"form": "notes", "second_order": True, "ordered": True},
        {"form": "notes_row_mean", "second_order": True},
        {"form": "notes", "bilinear": False},
    ],
}
CASES = [(kind, options) for kind in VARIANTS for options in ({}, *OPTIONS.get(kind, []))]
LEARNED = [
    (kind, {**options, "initial_state": "learned", "rank": 3})
    for kind, options in CASES
    if kind in POWER and options.get("degree", 2) <= 4  # type: ignore[operator]
]


def name(case: object) -> str | None:
    if isinstance(case, str):
        return case
    if isinstance(case, dict):
        return ",".join(f"{key}={value}" for key, value in case.items())
    return None


every_case = pytest.mark.parametrize(("kind", "options"), CASES, ids=name)
every_case_and_learned = pytest.mark.parametrize(("kind", "options"), CASES + LEARNED, ids=name)


def build(kind: str, options: dict[str, object] | None = None) -> Attention:
    """A float64 module with large parameters, so that each of them influences the output."""
    torch.manual_seed(0)
    attention = build_attention(kind, WIDTH, HEADS, **(options or {})).double()
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.normal_(std=0.5)
    return attention


def tokens(T: int, batch: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(T)
    return torch.randn(batch, T, WIDTH, dtype=torch.float64, generator=generator)


def assert_same(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-9)
