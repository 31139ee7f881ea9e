"""Every variant with the options that change what it computes."""

from typing import Any

import pytest
import torch
from torch import Tensor

from longhaul.modules.attention import (
    Attention,
    LayerShape,
    attention_config,
    build_attention,
    registered_variants,
)
from longhaul.modules.attention.power import PowerConfig
from longhaul.modules.rotary import RotaryScaling

WIDTH, HEADS = 16, 2


def groups_keys(kind: str) -> bool:
    with torch.device("meta"):
        return build_attention(kind, WIDTH, HEADS).groups_keys


VARIANTS = registered_variants()
POWER = [kind for kind in VARIANTS if issubclass(attention_config(kind), PowerConfig)]

# Options that change what a variant computes, tested besides its defaults. A new variant needs no
# entry. They may be those of the layer's shape, too: GROUPED has a key head for two query heads
# each, heads whose widths do not add up to that of the model, and norms of queries and keys.
GROUPED: dict[str, object] = {"heads": 4, "key_heads": 2, "head_dim": 6, "qk_norm": "full"}
YARN = RotaryScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
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
        {"generator_per": "pair", "negative_diagonal": True, **GROUPED},
        {"bilinear": False, "short_convolution": 4, **GROUPED},
    ],
    "alibi": [{"output_norm": "rms", "output_gate": "silu", "short_convolution": 4, **GROUPED}],
    "coca": [{"mode": "slack"}, {"longest_document": 64}],
    "complex": [
        {"decay": True},
        {"learned_rates": True, "learned_sizes": True},
        {"normalizer": "amplitudes", "decay": True},
        {"learned_rates": True, "learned_sizes": True, **GROUPED},
        {"normalizer": "amplitudes", **GROUPED},
    ],
    "conformal_sympow": [
        {"qk_norm": True},
        {"degree": 4},
        {"degree": 6},
        {"gate_init": "long_memory"},
        {"gate": "retention"},
        {"gate": "learned", "short_convolution": 3, **GROUPED},
    ],
    "deltanet": [{"negative_eigenvalues": True, "output_gate": "silu", "short_convolution": 0}],
    "fox": [{"shift": True, "output_norm": "rms", "output_gate": "sigmoid", **GROUPED}],
    "gated_deltanet": [{"negative_eigenvalues": True, "groups": 1, "key_dim": 4, "value_dim": 6}],
    "gated_linear": [{"short_convolution": 3, "output_gate": "none", "qk_norm": "head"}],
    "kimi_delta": [{"negative_eigenvalues": True, "key_dim": 3, "decay_bound": 5.0}],
    "linear": [
        {"feature_map": "relu"},
        {"feature_map": "identity", "normalizer": "head_norm"},
        {"rotary": "fixed", "gate": "data"},
        {"rotary": "fixed", "gate": "data", **GROUPED},
        {
            "rotary": "fixed",
            "gate": "data",
            "feature_map": "identity",
            "normalizer": "head_norm",
        },
    ],
    "mamba2": [{"expand": 1, "groups": 2, "key_dim": 6, "short_convolution": 2, "qk_norm": "head"}],
    "power_delta": [
        {
            "rotary": "none",
            "gate_init": "long_memory",
            "negative_eigenvalues": True,
            "short_convolution": 2,
        }
    ],
    "retention": [{"swish_gate": True}, {"group_norm": False}, {"swish_gate": True, **GROUPED}],
    "softmax": [
        {"longest_document": 64},
        {"window": 9, "output_gate": "sigmoid", "short_convolution": 3, **GROUPED},
        {"softcap": 2.0, "scale": 0.2, "rotary_share": 0.5, "rotary_scaling": YARN},
    ],
    "sympow": [
        {"degree": 4},
        {"degree": 8},
        {"rotary": "none"},
        {
            "longest_document": None,
            "rotary_base": 100.0,
            "rotary_share": 0.5,
            "rotary_scaling": YARN,
        },
    ],
    "sympow_gated": [
        {"gate_init": "long_memory"},
        {"gate": "learned"},
        {"gate": "alibi", "rotary": "none"},
        {"degree": 4, "output_norm": "rms", "output_gate": "sigmoid", **GROUPED},
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
        {"ordered": True, "zeroth": "first_layer", **GROUPED},
        {"form": "notes_row_mean", **GROUPED},
    ],
}


def options_of(kind: str) -> list[dict[str, object]]:
    """The options that a kind is tested with, of which some are GROUPED if it can be."""
    given = OPTIONS.get(kind, [])
    has_shape = any("key_heads" in options for options in given)
    return [{}, *given] if has_shape or not groups_keys(kind) else [{}, GROUPED, *given]


CASES = [(kind, options) for kind in VARIANTS for options in options_of(kind)]
# With GROUPED, every number of key heads and every norm, but not all pairs of them.
SHAPES: list[dict[str, object]] = [
    {**GROUPED, "key_heads": key_heads, "qk_norm": norm}
    for key_heads, norm in ((1, "head"), (2, "none"), (4, "full"))
]
WIDE = [(kind, shape) for kind in VARIANTS if groups_keys(kind) for shape in SHAPES]
WIDE = [case for case in WIDE if case not in CASES]
LEARNED = [
    (kind, {**options, "initial_state": "learned", "rank": 3})
    for kind, options in CASES
    if kind in POWER and options.get("degree", 2) <= 4  # type: ignore[operator]
]


def name(case: object) -> str | None:
    if isinstance(case, str):
        return case
    if isinstance(case, dict):
        values = ((key, getattr(value, "rope_type", value)) for key, value in case.items())
        return ",".join(f"{key}={value}" for key, value in values)
    return None


def is_wide(kind: str, options: dict[str, object]) -> bool:
    """formulas/ has all learned states; `make test` has here those of other shapes."""
    if options.get("initial_state") != "learned" or len(options) == 2:
        return False
    return options.keys().isdisjoint({*GROUPED, "second_order", "normalizer"})


def parametrized(*cases: tuple[str, dict[str, object]]) -> pytest.MarkDecorator:
    """Runs with these cases, and with those of their kinds in the other shapes if all tests run."""
    kinds = {kind for kind, _ in cases}
    wide = [case for case in cases if is_wide(*case)]
    wide += [case for case in WIDE if case[0] in kinds]
    return pytest.mark.parametrize(
        ("kind", "options"),
        [
            *(case for case in cases if not is_wide(*case)),
            *(pytest.param(*case, marks=pytest.mark.wide) for case in wide),
        ],
        ids=name,
    )


every_case = parametrized(*CASES)
every_case_and_learned = parametrized(*CASES, *LEARNED)


def fresh(kind: str, width: int, usual_heads: int, **options: Any) -> Attention:
    """A module as training begins with it, of options of its kind and of its shape."""
    heads = options.pop("heads", usual_heads)
    sizes: dict[str, Any] = {"key_heads": heads, "head_dim": width // heads, "qk_norm": "none"}
    # Symmetric powers have an option qk_norm of their own, which is true or false.
    given = {name for name in sizes if type(options.get(name)) is type(sizes[name])}
    sizes |= {name: options.pop(name) for name in given}
    shape = LayerShape(width=width, heads=heads, **sizes)
    return attention_config(kind)(**options).build(shape)


def build(kind: str, options: dict[str, object] | None = None) -> Attention:
    """A float64 module with large parameters, so that each of them influences the output."""
    torch.manual_seed(0)
    attention = fresh(kind, WIDTH, HEADS, **(options or {})).double()
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.normal_(std=0.5)
    return attention


def tokens(T: int, batch: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(T)
    return torch.randn(batch, T, WIDTH, dtype=torch.float64, generator=generator)


def assert_same(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-9)
