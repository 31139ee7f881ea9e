"""Models without a trainer: one update, timed; and decoding with recorded steps beside plain ones.

It needs no package of the trainer's (lightning, omegaconf, mlflow and others), so that it runs
where they are missing.
"""

from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from longhaul.modules.attention import attention_config, registered_variants
from longhaul.modules.language_model import LanguageModel
from longhaul.modules.language_model_config import LanguageModelConfig
from longhaul.pipeline.distributed.blocks import prepare_blocks
from longhaul.pipeline.generation.steps import Steps
from longhaul.pipeline.verification.check import Check, Needs, Place

_WARM_UP, _TIMED = 3, 10
_PROMPT, _TOKENS, _BATCH = 64, 40, 2


@dataclass(frozen=True, kw_only=True)
class Step:
    """A model, and how many tokens an update of it takes."""

    model: LanguageModelConfig
    context: int
    batch: int
    is_compiled: bool = False

    @property
    def name(self) -> str:
        compiled = ", compiled" if self.is_compiled else ""
        kind = self.model.attention.kind
        return f"124M, {kind}, {self.batch} x {self.context:,} tokens{compiled}"

    def measure(self, device: torch.device) -> dict[str, Any]:
        """Median milliseconds of an update, tokens per second, memory, and the losses.

        A loss that is not finite, or does not fall on the repeated batch, is a fault.
        """
        model = _built(self.model, device)
        prepare_blocks(model, checkpointing=0, compiled=self.is_compiled)
        shape = (self.batch, self.context + 1)
        tokens = torch.randint(self.model.vocabulary, shape, device=device)
        batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=device.type == "cuda")
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        losses, seconds = [], []
        for _ in range(_WARM_UP + _TIMED):
            started = perf_counter()
            with torch.autocast(device.type, torch.bfloat16):
                loss = model.loss(*batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())  # It waits for the device.
            seconds.append(perf_counter() - started)
        median = sorted(seconds[_WARM_UP:])[_TIMED // 2]
        return {
            "ms": 1e3 * median,
            "tokens_per_second": self.batch * self.context / median,
            "peak_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
            "losses": losses,
            "faults": faults_of(losses),
        }


_USUAL, _SOFTMAX = (
    LanguageModelConfig(attention=attention_config(kind)())
    for kind in ("conformal_sympow", "softmax")
)
# As many tokens in each.
STEPS = (
    Step(model=_USUAL, context=16_384, batch=2),
    Step(model=_SOFTMAX, context=16_384, batch=2),
    Step(model=_USUAL, context=1024, batch=32),
    Step(model=_USUAL, context=16_384, batch=2, is_compiled=True),
    Step(model=_SOFTMAX, context=16_384, batch=2, is_compiled=True),
)


def faults_of(losses: list[float]) -> list[str]:
    """What is wrong with the losses of a training."""
    if losses and torch.tensor(losses).isfinite().all() and losses[-1] < losses[0]:
        return []
    return [f"losses: found {losses}, wanted finite ones that fall"]


def decoding_checks() -> list[Check]:
    """Every kind of linear cost, and the usual one at the size of 124M parameters."""
    linear = [kind for kind in registered_variants() if attention_config(kind).cost == "linear"]
    models = [LanguageModelConfig(attention=_USUAL.attention, vocabulary=256)]
    models += [small_model(kind) for kind in linear]
    return [
        Check(
            part="kernels",
            name=f"decoding, {model.attention.kind}, {model.layers} layers of {model.width}",
            function=check_decoding,
            argument=model,
            seconds=120,
            needs=Needs(gpu=True),
        )
        for model in models
    ]


def small_model(kind: str) -> LanguageModelConfig:
    attention = attention_config(kind)()
    return LanguageModelConfig(attention=attention, layers=2, width=128, heads=2, vocabulary=256)


def check_decoding(config: LanguageModelConfig, place: Place) -> dict[str, Any]:
    """The largest difference of logits, and milliseconds a token both ways."""
    device = torch.device(place.device)
    model = _built(config, device).eval()
    tokens = torch.randint(config.vocabulary, (_BATCH, _PROMPT + _TOKENS), device=device)
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


def _built(config: LanguageModelConfig, device: torch.device) -> LanguageModel:
    """A model with the same random weights in every process."""
    torch.manual_seed(0)
    return LanguageModel(config).to(device)
