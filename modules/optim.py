"""The optimizer, its configuration, and the learning rate as a function of tokens seen."""

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch.optim import Optimizer

from longhaul.modules.choices import check_choices
from longhaul.modules.language_model import LanguageModel


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The learning-rate schedule: a warm-up, then one of four shapes over the token budget."""

    name: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """constant | linear | cosine | wsd (warm-up, stable, decay): shape after the warm-up."""

    warmup_tokens: int = 0
    """Tokens of linear warm-up from `start_factor` to the peak, 0 or more."""

    start_factor: float = 0.0
    """Learning rate at the first token, as a fraction of the peak, 0 to 1."""

    final_factor: float = 0.0
    """Learning rate at the last token, as a fraction of the peak, 0 to 1; unused by constant."""

    decay_tokens: int = 0
    """Tokens of the final linear decay of wsd; 0 for the other schedules."""

    def __post_init__(self) -> None:
        check_choices(self, "optim.schedule.")
        for name in ("start_factor", "final_factor"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(
                    f"optim.schedule.{name}: found {getattr(self, name)}, wanted 0 to 1"
                )
        for name in ("warmup_tokens", "decay_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"optim.schedule.{name}: found {getattr(self, name)}, wanted 0 or more"
                )
        if (self.name == "wsd") != (self.decay_tokens > 0):
            raise ValueError(
                f"optim.schedule.decay_tokens: found {self.decay_tokens}, wanted "
                + ("more than 0 for wsd" if self.name == "wsd" else f"0 for {self.name}")
            )


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer, its schedule, the size of an update, and what to do about spikes."""

    tokens_per_update: int
    """Tokens per update, over all ranks; a whole number of micro-batches on every rank."""

    name: Literal["adam", "adamw"] = "adamw"
    """adam | adamw: the optimizer."""

    learning_rate: float = 6e-4
    """Peak learning rate, more than 0."""

    beta1: float = 0.9
    """Decay of the first moment per update, 0 to below 1."""

    beta2: float = 0.999
    """Decay of the second moment per update, 0 to below 1."""

    epsilon: float = 1e-8
    """Added to the square root of the second moment, more than 0."""

    weight_decay: float = 0.0
    """Decay per unit of learning rate of the blocks' matrices alone, 0 or more; adamw only."""

    gradient_clip: float | None = 1.0
    """Largest norm of the whole gradient, more than 0; null: no clipping."""

    max_skipped_updates: int = 10
    """Number of consecutive skipped updates after which the run stops, 1 or more."""

    spike_sigma: float | None = None
    """Skip updates whose loss is so many deviations above the mean of the last 100; null: never."""

    on_spike: Literal["skip", "rewind"] = "skip"
    """skip | rewind: also restore the newest checkpoint's weights; step and data continue."""

    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """The learning rate as a function of tokens."""

    def __post_init__(self) -> None:
        check_choices(self, "optim.")
        if self.name == "adam" and self.weight_decay:
            raise ValueError(
                f"optim.weight_decay: found {self.weight_decay}, wanted 0 for adam (or name: adamw)"
            )
        for name in ("tokens_per_update", "learning_rate", "epsilon", "max_skipped_updates"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(
                    f"optim.{name}: found {getattr(self, name)}, wanted more than 0, finite"
                )
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"optim.weight_decay: found {self.weight_decay}, wanted 0 or more")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"optim.{name}: found {getattr(self, name)}, wanted [0, 1)")
        for name in ("gradient_clip", "spike_sigma"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"optim.{name}: found {value}, wanted more than 0, or null")
        if self.on_spike == "rewind" and self.spike_sigma is None:
            raise ValueError(
                "optim.spike_sigma: found null with optim.on_spike rewind, wanted a number"
            )


def build_optimizer(model: LanguageModel, config: OptimConfig) -> Optimizer:
    """The optimizer of all trainable parameters, with weight decay for the blocks' matrices."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if config.weight_decay:
        leading = model.matrices()
    else:
        # Nothing is decayed; this keeps the order of parameters of earlier runs, to the bit.
        leading = {name for name, p in parameters.items() if p.ndim >= 2}
    decayed = [p for name, p in parameters.items() if name in leading]
    others = [p for name, p in parameters.items() if name not in leading]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    # torch cannot save and restore an optimizer with an empty group.
    groups = [group for group in groups if group["params"]]
    cls = torch.optim.AdamW if config.name == "adamw" else torch.optim.Adam
    return cls(
        groups,
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        fused=True,
    )


def learning_rate_factor(config: ScheduleConfig, tokens: int, max_tokens: int) -> float:
    """Fraction of the peak learning rate for the update that begins after `tokens` tokens."""
    if tokens < config.warmup_tokens:
        return config.start_factor + (1 - config.start_factor) * tokens / config.warmup_tokens
    if config.name == "constant":
        return 1.0
    start = max_tokens - config.decay_tokens if config.name == "wsd" else config.warmup_tokens
    done = min(1.0, max(0.0, (tokens - start) / max(1, max_tokens - start)))
    if config.name == "cosine":
        done = (1 - math.cos(math.pi * done)) / 2
    return 1 + (config.final_factor - 1) * done
