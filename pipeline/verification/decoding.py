"""Decoding of a model with steps recorded as CUDA graphs: logits beside those of plain steps."""

from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from longhaul.modules.attention import attention_config, registered_variants
from longhaul.modules.language_model import LanguageModel
from longhaul.pipeline.generation.steps import Steps
from longhaul.pipeline.verification.check import Check, Needs, Place
from longhaul.pipeline.verification.training_step import build_model

_PROMPT, _TOKENS, _BATCH, _VOCABULARY = 64, 40, 2, 256


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """A model to decode with."""

    kind: str
    layers: int = 2
    width: int = 128
    heads: int = 2

    @property
    def name(self) -> str:
        return f"decoding, {self.kind}, {self.layers} layers of {self.width}"


def decoding_checks() -> list[Check]:
    """Every kind of linear cost, and the usual one at the size of 124M parameters."""
    linear = [kind for kind in registered_variants() if attention_config(kind).cost == "linear"]
    models = [Decoding(kind="conformal_sympow", layers=12, width=768, heads=12)]
    models += [Decoding(kind=kind) for kind in linear]
    return [
        Check(
            part="kernels",
            name=model.name,
            function=check_decoding,
            argument=model,
            seconds=120,
            needs=Needs(gpu=True),
        )
        for model in models
    ]


def check_decoding(decoding: Decoding, place: Place) -> dict[str, Any]:
    """The largest difference of logits, and milliseconds a token both ways."""
    device = torch.device(place.device)
    sizes = (decoding.layers, decoding.width, decoding.heads, _VOCABULARY)
    model = build_model(decoding.kind, *sizes, device).eval()
    tokens = torch.randint(_VOCABULARY, (_BATCH, _PROMPT + _TOKENS), device=device)
    plain, plain_ms = _decode(model, tokens, model.step)
    steps = Steps(model)
    found, ms = _decode(model, tokens, steps)
    faults = []
    if device.type == "cuda" and not steps.is_recorded:
        faults.append("steps: found none recorded as a CUDA graph")
    difference = (found - plain).abs().max().item()
    allowed = 1e-3 * plain.abs().max().item()
    # Not >, which is false for NaN.
    if not difference <= allowed:
        faults.append(f"logits: found {difference:.3g} off plain steps, wanted {allowed:.3g}")
    return {"ms": ms, "plain_ms": plain_ms, "difference": difference, "faults": faults}


def _decode(model: LanguageModel, tokens: Tensor, step: Any) -> tuple[Tensor, float]:
    """The logits of every step, and the median milliseconds of one."""
    _, state = model.prefill(tokens[:, :_PROMPT])
    logits, seconds = [], []
    for token in tokens[:, _PROMPT:].unbind(dim=1):
        started = perf_counter()
        found, state = step(token, state)
        # Fetching a number waits for the device.
        found[0, 0].item()
        seconds.append(perf_counter() - started)
        logits.append(found.clone())
    return torch.stack(logits), 1e3 * sorted(seconds)[len(seconds) // 2]
