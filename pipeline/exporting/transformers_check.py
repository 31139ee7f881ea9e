"""What the check of an export computes with transformers, which may not be installed."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longhaul.pipeline.architectures.architecture import Architecture

STEPS = 4
"""Tokens of a padded pair that are read one at a time, after the others."""


def has_transformers() -> bool:
    """Whether transformers 5 can be imported."""
    try:
        version: str = importlib.import_module("transformers").__version__
    except ImportError:
        return False
    return int(version.partition(".")[0]) >= 5


def check_loadable(architecture: Architecture) -> None:
    """Raise ValueError without transformers, which an export of this architecture is checked by."""
    if not has_transformers():
        raise ValueError(
            f"transformers: found no version 5, wanted it, to check the exported "
            f"{architecture.name}; with --as longhaul none is needed"
        )


def load_architecture(folder: Path) -> Any:
    """The model of transformers in a folder without code."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    had_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        load: Any = AutoModelForCausalLM.from_pretrained
        return load(folder, dtype=torch.float32, local_files_only=True).eval()
    finally:
        if had_bars:
            logging.enable_progress_bar()


@torch.no_grad()
def logits_in_parts(model: Any, tokens: Tensor, before_steps: int | None) -> Tensor:
    """Logits (T, vocabulary) of a text that is read at once, or its end one token at a time."""
    count = tokens.shape[1] if before_steps is None else before_steps
    output = model(tokens[:, :count], use_cache=before_steps is not None)
    outputs = [output.logits]
    for place in range(count, tokens.shape[1]):
        token = tokens[:, place : place + 1]
        output = model(token, past_key_values=output.past_key_values, use_cache=True)
        outputs.append(output.logits)
    return torch.cat(outputs, dim=1)[0]


@torch.no_grad()
def padded_pair(
    model: Callable[..., Any], short: Tensor, long: Tensor, steps: int, *, has_positions: bool
) -> tuple[Tensor, Tensor]:
    """Logits of two texts (1, T) of different lengths, read together with padding before one.

    So many last tokens are read one at a time; without any, no states are kept. A model of
    transformers has positions: it is told that of each token in its text, as `generate` does.
    """
    padding = long.shape[1] - short.shape[1]
    rows = torch.cat([torch.cat([long[:, :padding], short], dim=1), long])
    mask = torch.ones_like(rows)
    mask[0, :padding] = 0
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)

    def read(begin: int, end: int, **options: Any) -> Any:
        if has_positions:
            options["position_ids"] = positions[:, begin:end]
        options["use_cache"] = steps > 0
        return model(rows[:, begin:end], attention_mask=mask[:, :end], **options)

    count = rows.shape[1] - steps
    output = read(0, count)
    outputs = [output.logits]
    for end in range(count + 1, rows.shape[1] + 1):
        output = read(end - 1, end, past_key_values=output.past_key_values)
        outputs.append(output.logits)
    logits = torch.cat(outputs, dim=1)
    return logits[0, padding:], logits[1]
