"""One update of a model: loss, gradients, AdamW, without a trainer around it.

It needs no package of the trainer's (lightning, omegaconf, mlflow and others), so that it can be
timed where they are missing.
"""

from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from longhaul.modules.attention import attention_config
from longhaul.modules.language_model import LanguageModel, LanguageModelConfig
from longhaul.pipeline.distributed.blocks import prepare_blocks

_WARM_UP, _TIMED = 3, 10


@dataclass(frozen=True, kw_only=True)
class Step:
    """A model, and how many tokens an update of it takes. The default is GPT-2's of 124M."""

    kind: str
    context: int
    batch: int
    is_compiled: bool = False
    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50_304

    @property
    def name(self) -> str:
        compiled = ", compiled" if self.is_compiled else ""
        return f"124M, {self.kind}, {self.batch} x {self.context:,} tokens{compiled}"


# As many tokens in each.
STEPS = (
    Step(kind="conformal_sympow", context=16_384, batch=2),
    Step(kind="softmax", context=16_384, batch=2),
    Step(kind="conformal_sympow", context=1024, batch=32),
    Step(kind="conformal_sympow", context=16_384, batch=2, is_compiled=True),
    Step(kind="softmax", context=16_384, batch=2, is_compiled=True),
)


def measure_step(step: Step, device: torch.device) -> dict[str, Any]:
    """Median milliseconds of an update, tokens per second, memory, and the losses.

    A loss that is not finite, or does not fall on the repeated batch, is a fault.
    """
    model, batch = _build(step, device)
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
    is_sound = all(map(torch.isfinite, torch.tensor(losses))) and losses[-1] < losses[0]
    return {
        "ms": 1e3 * median,
        "tokens_per_second": step.batch * step.context / median,
        "peak_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
        "losses": losses,
        "faults": [] if is_sound else [f"losses: found {losses}, wanted finite ones that fall"],
    }


def build_model(
    kind: str, layers: int, width: int, heads: int, vocabulary: int, device: torch.device
) -> LanguageModel:
    """A model with the same random weights in every process."""
    torch.manual_seed(0)
    config = LanguageModelConfig(
        attention=attention_config(kind)(),
        layers=layers,
        width=width,
        heads=heads,
        vocabulary=vocabulary,
    )
    return LanguageModel(config).to(device)


def _build(step: Step, device: torch.device) -> tuple[LanguageModel, tuple[Tensor, Tensor]]:
    model = build_model(step.kind, step.layers, step.width, step.heads, step.vocabulary, device)
    prepare_blocks(model, checkpoint_every=0, compiled=step.is_compiled)
    tokens = torch.randint(step.vocabulary, (step.batch, step.context + 1), device=device)
    return model, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
