"""The optimizer, its configuration, and the learning rate as a function of tokens seen."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, get_args

import torch
from torch.optim import Optimizer

from longhaul.modules.choices import check_bounds, check_choices
from longhaul.modules.language_model import LanguageModel
from longhaul.modules.roles import Role, fused_rows, parameter_roles

_ADAM = "exp_avg", "exp_avg_sq"
MOMENTS = {"adam": _ADAM, "adamw": _ADAM, "muon": ("momentum",)}
"""What each kind of group keeps of a parameter, in the parameter's shape."""


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
        prefix = "optim.schedule."
        check_bounds(self, "start_factor", "final_factor", least=0, most=1, prefix=prefix)
        check_bounds(self, "warmup_tokens", "decay_tokens", least=0, prefix=prefix)
        if (self.name == "wsd") != (self.decay_tokens > 0):
            raise ValueError(
                f"optim.schedule.decay_tokens: found {self.decay_tokens}, wanted "
                + ("more than 0 for wsd" if self.name == "wsd" else f"0 for {self.name}")
            )


@dataclass(frozen=True, kw_only=True)
class LargerUpdateConfig:
    """An entry of `optim.larger_updates`: the size of updates from a number of tokens on."""

    at_tokens: int
    """Tokens trained before, rounded up to a whole number of updates."""

    factor: int
    """Size in `tokens_per_update`, 2 or more, and more than before; the rate grows by its root."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer, its schedule, the size of an update, and what to do about spikes."""

    tokens_per_update: int
    """Tokens per update, over all ranks; a whole number of micro-batches on every rank."""

    larger_updates: list[LargerUpdateConfig] = field(default_factory=list)
    """Larger updates from later tokens on, in their order, each with the keys below."""

    name: Literal["adam", "adamw", "muon"] = "adamw"
    """adam | adamw | muon (for the matrices of blocks; adam for the rest): the optimizer."""

    learning_rate: float = 6e-4
    """Peak learning rate, more than 0."""

    beta1: float = 0.9
    """Decay of Adam's first moment per update, 0 to below 1."""

    beta2: float = 0.999
    """Decay of Adam's second moment per update, 0 to below 1."""

    epsilon: float = 1e-8
    """Added to the square root of Adam's second moment, more than 0."""

    weight_decay: float = 0.0
    """Decay per unit of learning rate of the blocks' matrices alone, 0 or more; not adam."""

    gradient_clip: float | None = 1.0
    """Largest norm of the whole gradient, more than 0; null: no clipping."""

    z_loss: float = 0.0
    """Factor of the mean of (log sum exp logits)^2, added to the loss in training, 0 or more."""

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
        positive = ("tokens_per_update", "learning_rate", "epsilon", "max_skipped_updates")
        check_bounds(self, *positive, above=0, below=math.inf, prefix="optim.")
        check_bounds(self, "weight_decay", "z_loss", least=0, below=math.inf, prefix="optim.")
        check_bounds(self, "beta1", "beta2", least=0, below=1, prefix="optim.")
        check_bounds(self, "gradient_clip", "spike_sigma", above=0, prefix="optim.")
        if self.on_spike == "rewind" and self.spike_sigma is None:
            raise ValueError(
                "optim.spike_sigma: found null with optim.on_spike rewind, wanted a number"
            )
        for number, one in enumerate(self.larger_updates):
            prefix = f"optim.larger_updates.{number}."
            check_bounds(one, "at_tokens", least=1, prefix=prefix)
            check_bounds(one, "factor", least=2, most=1 << 20, prefix=prefix)
        for number, pair in enumerate(pairwise(self.larger_updates), 1):
            for key in ("at_tokens", "factor"):
                before, found = (getattr(one, key) for one in pair)
                if found <= before:
                    raise ValueError(
                        f"optim.larger_updates.{number}.{key}: found {found}, wanted more than the "
                        f"{before} before it"
                    )

    def update_factor(self, tokens: int) -> int:
        """Steps that the update counts as which begins after so many trained tokens.

        It has as many times `tokens_per_update` tokens.
        """
        factors = (one.factor for one in self.larger_updates[::-1] if one.at_tokens <= tokens)
        return next(factors, 1)

    def num_steps(self, tokens: int) -> int:
        """Steps of the fewest updates that have so many tokens together."""
        step = 0
        ends = [one.at_tokens for one in self.larger_updates]
        for end in (*ends, tokens):
            end = min(end, tokens)
            missing = -(-end // self.tokens_per_update) - step
            if missing > 0:
                factor = self.update_factor(step * self.tokens_per_update)
                step += -(-missing // factor) * factor
        return step


def parameter_groups(model: LanguageModel, config: OptimConfig) -> list[dict[str, Any]]:
    """Groups of all trainable parameters, by their roles; a role's settings are stated here alone.

    Each has a `kind`, which decides how its parameters are updated and what state they have, a
    factor of the learning rate, `lr_factor`, and a `weight_decay`; one of kind muon also has the
    `rows` of the matrices that each of its parameters holds.
    """
    other = "adam" if config.name == "muon" else config.name
    settings = {
        role: {
            "kind": config.name if role == "matrix" else other,
            "lr_factor": 1.0,
            "weight_decay": config.weight_decay if role == "matrix" else 0.0,
        }
        for role in get_args(Role)
    }
    roles = parameter_roles(model)
    trained = [(roles[name], p) for name, p in model.named_parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = []
    for number, one in enumerate(settings.values()):
        if one not in list(settings.values())[:number]:
            groups.append({"params": [p for role, p in trained if settings[role] == one], **one})
    if len(groups) == 1:
        # The order of groups decides how the norm is summed and how ZeRO shards. Splitting by
        # number of dimensions keeps it as in runs begun earlier.
        groups = [
            {**groups[0], "params": [p for _, p in trained if (p.ndim >= 2) == is_first]}
            for is_first in (True, False)
        ]
    fused = fused_rows(model)
    rows = {id(p): fused.get(name, (len(p),)) for name, p in model.named_parameters() if p.ndim}
    for group in groups:
        if group["kind"] == "muon":
            group["rows"] = [rows[id(p)] for p in group["params"]]
    # torch cannot save and restore an optimizer with an empty group.
    return [group for group in groups if group["params"]]


def state_keys(group: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the tensors kept for each parameter of a group, after its first update."""
    moments = MOMENTS[group["kind"]]
    return moments if group["kind"] == "muon" else ("step", *moments)


def num_moments(groups: Iterable[Mapping[str, Any]]) -> int:
    """Number of elements of all moments."""
    return sum(len(MOMENTS[group["kind"]]) * p.numel() for group in groups for p in group["params"])


def build_optimizer(model: LanguageModel, config: OptimConfig) -> Optimizer:
    """The optimizer of all trainable parameters."""
    groups, betas = parameter_groups(model, config), (config.beta1, config.beta2)
    if config.name == "muon":
        # Here: reading a config needs not wait for DTensor, which takes a second to import.
        from longhaul.modules.muon import Muon

        return Muon(groups, lr=config.learning_rate, betas=betas, eps=config.epsilon)
    cls = torch.optim.AdamW if config.name == "adamw" else torch.optim.Adam
    return cls(groups, lr=config.learning_rate, betas=betas, eps=config.epsilon, fused=True)


def set_learning_rate(optimizer: Optimizer, learning_rate: float) -> None:
    """Set the rate of each group, a multiple of this one."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group["lr_factor"]


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
