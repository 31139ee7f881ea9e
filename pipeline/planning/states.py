"""States of symmetric powers beside those of tensor powers and the weights, as in the sympow paper.

Buckman, Gelada, Zhang: Symmetric Power Transformers (2024), whose tables have these columns.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

from longhaul.configs.presets import find_preset
from longhaul.configs.yaml_text import parse_yaml
from longhaul.modules.attention import AttentionConfig, attention_config
from longhaul.modules.attention.sympow import Sympow, SympowOptions
from longhaul.modules.language_model_config import LanguageModelConfig
from longhaul.modules.meta_device import build_on_meta
from longhaul.pipeline.planning.sizes import (
    HALF,
    allocated_bytes,
    attention_layers,
    state_bytes,
)
from longhaul.pipeline.terminal.numbers import amount, digits, in_bytes
from longhaul.pipeline.terminal.table import print_table

_DEGREES = (2, 4, 6, 8)
_SIZES = ("gpt2-124m", "gpt2-354m", "gpt2-772m", "gpt2-1.6b")
# Of an A100 or H100: what the paper takes as the limit of a practical state.
_LIMIT_BYTES = 80 * 10**9
_COLUMNS = (
    "degree",
    "tensor power",
    "<= 80 GB",
    "symmetric power",
    "<= 80 GB",
    "saving",
    "state / weights",
)


def states_by_degree(model: LanguageModelConfig) -> list[list[str]]:
    """The column names, then one row per degree of a model's symmetric-power layers."""
    rows = [[*_COLUMNS, "allocated"]]
    for degree in _DEGREES:
        layers, parameters = _of_degree(model, degree)
        rows.append([*_row(layers, parameters, degree), in_bytes(allocated_bytes(layers, 1))])
    return rows


def print_states() -> None:
    """Print the states of the sympow paper's four sizes of GPT-2."""
    print(
        "States of one sequence, in half precision and without padding, and numbers in them per"
        " weight.\nDegree 1: the linear transformer, without a normaliser.\n"
    )
    print_table(states_of_published_sizes())


def states_of_published_sizes() -> list[list[str]]:
    """The column names, then one row per size of GPT-2 and degree.

    Degree 1 is the paper's linear transformer, whose state has no normaliser: K x V numbers per
    head.
    """
    rows = [["model", "weights", "state in numbers", *_COLUMNS]]
    linear, sympow = attention_config("linear"), attention_config("sympow")
    for size in _SIZES:
        plain = linear(normalizer="head_norm")  # type: ignore[call-arg]
        built = build_on_meta(_model(size, plain))
        numbers = state_bytes(attention_layers(built), 1) // HALF.itemsize
        row = _columns(numbers, numbers, built.num_parameters(), degree=1)
        rows.append([size, amount(built.num_parameters()), f"{numbers:,}", *row])
        for degree in _DEGREES:
            layers, parameters = _of_degree(_model(size, sympow()), degree)
            numbers = state_bytes(layers, 1) // HALF.itemsize
            row = _row(layers, parameters, degree)
            rows.append([size, amount(parameters), f"{numbers:,}", *row])
    return rows


def _model(size: str, attention: AttentionConfig) -> LanguageModelConfig:
    """The model of a preset in configs/model."""
    preset = find_preset(Path(f"model/{size}.yaml"))
    assert preset is not None
    shape: dict[str, Any] = parse_yaml(preset.read_text(encoding="utf-8"))["model"]
    return LanguageModelConfig(attention=attention, **shape)


def _of_degree(model: LanguageModelConfig, degree: int) -> tuple[list[Sympow], int]:
    """The symmetric-power layers of a model with all of them at this degree, and its parameters."""

    def changed(attention: AttentionConfig) -> AttentionConfig:
        if isinstance(attention, SympowOptions):
            return dataclasses.replace(attention, degree=degree)
        return attention

    others = {key: changed(other) for key, other in model.layer_attention.items()}
    built = build_on_meta(
        dataclasses.replace(model, attention=changed(model.attention), layer_attention=others)
    )
    layers = [layer for layer in attention_layers(built) if isinstance(layer, Sympow)]
    return layers, built.num_parameters()


def _row(layers: list[Sympow], parameters: int, degree: int) -> list[str]:
    symmetric = state_bytes(layers, 1) // HALF.itemsize
    tensor = sum(layer.tensor_power_size() for layer in layers)
    return _columns(tensor, symmetric, parameters, degree)


def _columns(tensor: int, symmetric: int, parameters: int, degree: int) -> list[str]:
    """The cells of `_COLUMNS`, from numbers in the two states and in the weights."""
    cells = [f"{degree}"]
    for numbers in (tensor, symmetric):
        size = numbers * HALF.itemsize
        cells += [in_bytes(size), "yes" if size <= _LIMIT_BYTES else "no"]
    return [*cells, _saving(symmetric / tensor), digits(symmetric / parameters)]


def _saving(left: float) -> str:
    """1 - left in percent, with the decimals that show the first digit of what is left."""
    decimals = max(0, -math.floor(math.log10(100 * left)))
    return f"{100 * (1 - left):.{decimals}f}%"
