"""Layers of every kind, and documents, that are compared in parts of a sequence and as a whole."""

from typing import Any

from longhaul.modules.attention import attention_config, registered_variants
from longhaul.modules.attention.power import PowerConfig
from longhaul.modules.attention.recurrent.delta import DeltaConfig

# Offsets of documents that span several parts, end where a part ends, or share a part.
PACKINGS = {
    "rows": None,
    "straddling": [0, 1, 40, 100, 108],
    "at borders": [0, 27, 30, 35, 54, 108],
}
NEIGHBOUR = slice(1, 40)  # a document of "straddling"
LEARNED = {"initial_state": "learned", "rank": 3}
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "alibi": [{}, {"key_heads": 1}],
    "cartan": [
        {},
        {"generator": "additive"},
        {"generator": "product", "negative_diagonal": True},
        {"bilinear": False},
        {"generator_per": "pair"} | LEARNED,
        {"bilinear": False, "generator_per": "pair"},
        LEARNED,
    ],
    "complex": [
        {},
        {"decay": True},
        {"decay": True} | LEARNED,
        {"learned_rates": True, "learned_sizes": True} | LEARNED,
        {"normalizer": "amplitudes"} | LEARNED,
        {"key_heads": 1, "learned_rates": True, "decay": True},
    ],
    "coca": [{}, {"mode": "slack"}],
    "conformal_sympow": [
        {},
        {"degree": 4, "qk_norm": True},
        LEARNED,
        {"key_heads": 1, "degree": 4} | LEARNED,
    ],
    "deltanet": [{}],
    "gated_deltanet": [{}],
    "gated_linear": [{}],
    "kimi_delta": [{}],
    "linear": [
        {},
        {"feature_map": "identity", "normalizer": "head_norm"},
        {"rotary": "fixed", "gate": "data"} | LEARNED,
    ],
    "fox": [{}, {"key_heads": 1}, {"key_heads": 1, "shift": True, "output_norm": "rms"}],
    "mamba2": [{}],
    "retention": [{}, {"swish_gate": True, "short_convolution": 4}, LEARNED],
    # Windows within a part, of a part and of several: parts have 54, 36 or 27 tokens.
    "sliding_window": [
        {"window": 1},
        {"window": 9, "key_heads": 1},
        {"window": 28, "softcap": 2.0},
        {"window": 60},
    ],
    "softmax": [
        {},
        {"softcap": 2.0, "scale": 0.2, "rotary": "none"},
        {"key_heads": 1, "short_convolution": 4},
    ],
    "sympow": [{}, {"degree": 4} | LEARNED, {"rotary": "none"}],
    "sympow_gated": [
        {},
        {"gate": "learned"} | LEARNED,
        {"gate": "alibi", "rotary": "none", "degree": 4},
    ],
    "zeros": [
        {},
        {"ordered": True, "second_order": True, "zeroth": "first_layer"},
        {"form": "notes", "second_order": True, "bilinear": False},
        LEARNED,
    ],
}
KINDS = [kind for kind in registered_variants() if kind != "power_delta"]
POWER = [kind for kind in KINDS if issubclass(attention_config(kind), PowerConfig)]
CHUNKED = [kind for kind in KINDS if issubclass(attention_config(kind), (PowerConfig, DeltaConfig))]
OPTIONS = {kind: [{}, LEARNED] for kind in POWER} | OPTIONS
# The defaults of each kind with every packing, and each of its options with one of them in turn.
LAYERS = {
    f"{kind} {options or ''} {packing}": (kind, options, offsets)
    for kind in KINDS
    for number, options in enumerate(OPTIONS[kind])
    for turn, (packing, offsets) in enumerate(PACKINGS.items())
    if not options or kind == "sliding_window" or turn == number % len(PACKINGS)
}
