"""Learning rate as a function of tokens seen."""

import math
from dataclasses import dataclass

_SCHEDULES = ("constant", "linear", "cosine", "wsd")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Warm-up, then one of four shapes over the run's token budget."""

    name: str = "constant"
    """constant | linear | cosine | wsd (warm-up, stable, decay)."""

    warmup_tokens: int = 0
    """Tokens of linear warm-up from `start_factor`."""

    start_factor: float = 0.0
    """Rate at the first token, as a fraction of the peak."""

    final_factor: float = 0.0
    """Rate at the last token, as a fraction of the peak; unused by constant."""

    decay_tokens: int = 0
    """Tokens of the final linear decay of wsd; must be 0 for the others."""

    def __post_init__(self) -> None:
        if self.name not in _SCHEDULES:
            raise ValueError(
                f"optim.schedule.name: found {self.name!r}, wanted one of {', '.join(_SCHEDULES)}"
            )
        for field in ("start_factor", "final_factor"):
            if not 0 <= getattr(self, field) <= 1:
                raise ValueError(
                    f"optim.schedule.{field}: found {getattr(self, field)}, wanted 0 to 1"
                )
        for field in ("warmup_tokens", "decay_tokens"):
            if getattr(self, field) < 0:
                raise ValueError(
                    f"optim.schedule.{field}: found {getattr(self, field)}, wanted 0 or more"
                )
        if (self.name == "wsd") != (self.decay_tokens > 0):
            raise ValueError(
                f"optim.schedule.decay_tokens: found {self.decay_tokens}, wanted "
                + ("more than 0 for wsd" if self.name == "wsd" else f"0 for {self.name}")
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
