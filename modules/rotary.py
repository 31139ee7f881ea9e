"""Rotary positions, accurate over a million tokens, and how they are scaled."""

import math
from dataclasses import dataclass, field, fields
from typing import Literal, NoReturn

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from longhaul.kernels.rotary import rotate
from longhaul.modules.choices import check_choices


@dataclass(frozen=True, kw_only=True)
class PositionScaling:
    """How rotary positions are scaled for contexts longer than in training; evaluation only."""

    name: str = "none"
    """none | linear (rates divided by the factor) | dynamic_ntk (base raised with the length)."""

    factor: float = 1.0
    """Ratio of the longer context to the training context, 1 or more."""

    context: int = 0
    """Training context, in tokens; dynamic_ntk does not change sequences up to this length."""

    def __post_init__(self) -> None:
        if self.name not in ("none", "linear", "dynamic_ntk"):
            raise ValueError(
                f"positions: found {self.name!r}, wanted one of none, linear, dynamic_ntk"
            )
        if not 1 <= self.factor < math.inf:
            raise ValueError(f"position factor: found {self.factor}, wanted 1 or more, finite")
        if self.name == "dynamic_ntk" and self.context < 1:
            raise ValueError(f"position context: found {self.context}, wanted the training context")


_LONG = ("factor", "attention_factor", "original_max_position_embeddings")

ROTARY_SCALINGS: dict[str, tuple[str, ...]] = {
    "none": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (*_LONG, "beta_fast", "beta_slow", "truncate"),
    "longrope": (*_LONG, "short_factor", "long_factor"),
}
"""The options of RotaryScaling that each of its `rope_type` reads."""


@dataclass(frozen=True, kw_only=True)
class RotaryScaling:
    """How a model scales its rotation rates theta_j, whose wavelengths are 2 pi / theta_j tokens.
    Options have the names of transformers; L0 is original_max_position_embeddings.
    """

    rope_type: Literal["none", "linear", "llama3", "yarn", "longrope"] = "none"
    """none | linear (all rates / factor) | llama3, yarn (slow ones only) | longrope (by lists)."""

    factor: float = 1.0
    """Ratio of the longer context to L0, 1 or more; none does not read it."""

    original_max_position_embeddings: int | None = None
    """L0 of llama3, yarn, longrope: the context before it was made longer, in tokens, 2 or more."""

    low_freq_factor: float = 1.0
    """llama3: rates of wavelengths above L0 / low_freq_factor are divided by factor; above 0."""

    high_freq_factor: float = 4.0
    """llama3: those of wavelengths below L0 / high_freq_factor stay; above low_freq_factor."""

    beta_fast: float = 32.0
    """yarn: rates that turn more often than this in L0 tokens stay, more than beta_slow."""

    beta_slow: float = 1.0
    """yarn: rates that turn less often than this in L0 tokens are divided by factor, above 0."""

    truncate: bool = True
    """yarn: the pairs at which rates begin and end to change are whole numbers."""

    attention_factor: float | None = None
    """yarn, longrope: factor of rotated queries and keys; null: it follows from factor (and L0)."""

    short_factor: list[float] = field(default_factory=list)
    """longrope: divisors of the rates in sequences of up to L0 tokens, one for each pair."""

    long_factor: list[float] = field(default_factory=list)
    """longrope: those in longer sequences."""

    def check(self) -> None:
        """Raise ValueError at an option that does not fit."""
        check_choices(self, "rotary_scaling.")
        read, default = ROTARY_SCALINGS[self.rope_type], RotaryScaling()
        for one in fields(self)[1:]:
            if one.name not in read and getattr(self, one.name) != getattr(default, one.name):
                self._refuse(one.name, f"it left out with {self.rope_type}, which does not read it")
        if "original_max_position_embeddings" in read and self.context < 2:
            self._refuse("original_max_position_embeddings", "2 or more")
        if not 1 <= self.factor < math.inf:
            self._refuse("factor", "1 or more, finite")
        if not 0 < self.low_freq_factor < self.high_freq_factor < math.inf:
            self._refuse("high_freq_factor", "more than low_freq_factor, which is more than 0")
        if not 0 < self.beta_slow < self.beta_fast < math.inf:
            self._refuse("beta_fast", "more than beta_slow, which is more than 0")
        if self.attention_factor is not None and not 0 < self.attention_factor < math.inf:
            self._refuse("attention_factor", "more than 0, finite")
        for name in ("short_factor", "long_factor"):
            divisors = getattr(self, name)
            if name in read and not (divisors and all(0 < one < math.inf for one in divisors)):
                self._refuse(name, "one number more than 0 for each pair")

    def _refuse(self, name: str, wanted: str) -> NoReturn:
        found = getattr(self, name)
        raise ValueError(f"rotary_scaling.{name}: found {found}, wanted {wanted}")

    @property
    def depends_on_length(self) -> bool:
        """Whether rates change with the sequence length."""
        return self.rope_type == "longrope" and self.short_factor != self.long_factor

    @property
    def gain(self) -> float:
        """The factor of cosines and sines."""
        if self.rope_type not in ("yarn", "longrope") or self.attention_factor is not None:
            return self.attention_factor or 1.0
        if self.factor == 1:
            return 1.0
        if self.rope_type == "yarn":
            return 0.1 * math.log(self.factor) + 1
        return math.sqrt(1 + math.log(self.factor) / math.log(self.context))

    @property
    def context(self) -> int:
        """L0; 0 where it has no meaning."""
        return self.original_max_position_embeddings or 0

    def scaled(
        self, turns: Float64[Tensor, "J"], base: float, first_turns: float, length: int
    ) -> Float64[Tensor, "J"]:
        """Turns per token of every pair in a sequence of `length` tokens.

        `turns` are those without scaling, first_turns base^(-j / J) for j = 0, 1, ...
        Sources: linear interpolation, Chen et al. (2023), arXiv:2306.15595; yarn, Peng et al.
        (2023), arXiv:2309.00071; longrope, Ding et al. (2024), arXiv:2402.13753; llama3, the code
        of Llama 3.1. All as in transformers.
        """
        slow = turns / self.factor
        if self.rope_type == "none":
            return turns
        if self.rope_type == "linear":
            return slow
        if self.rope_type == "longrope":
            divisors = self.long_factor if length > self.context else self.short_factor
            return turns / turns.new_tensor(divisors)
        if self.rope_type == "llama3":
            low, high = self.low_freq_factor, self.high_freq_factor
            kept = ((self.context * turns - low) / (high - low)).clamp(0, 1)
            return kept * turns + (1 - kept) * slow
        first, last = (
            # The pair, perhaps between two, that turns so often in L0 tokens.
            len(turns) * math.log(self.context * first_turns / often) / math.log(base)
            for often in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * len(turns) - 1)
        pairs = torch.arange(len(turns), dtype=turns.dtype, device=turns.device)
        divided = ((pairs - first) / ((last - first) or 1e-3)).clamp(0, 1)
        return divided * slow + (1 - divided) * turns


class Rotary:
    """Rotation rates of pairs of coordinates: theta_j = first base^(-2 (j - 1) / d), j = 1, ...

    The usual embedding has first = 1 radian per token. The symmetric-power papers have first =
    2 pi, and base = N, the length of the longest document. Rates are stored in turns per token.
    `backwards` rotates by the negative of every angle. The first d = share x width coordinates
    rotate, j with j + d / 2; the others do not.
    """

    def __init__(
        self,
        width: int,
        *,
        base: float,
        first_turns: float = 1 / (2 * math.pi),
        backwards: bool = False,
        share: float = 1.0,
        model_scaling: RotaryScaling | None = None,
    ) -> None:
        self.width = int(width * share)
        if self.width % 2 or self.width < 2:
            raise ValueError(
                f"head width: found {self.width} coordinates to rotate of {width}, wanted an even "
                "number, 2 or more, since pairs rotate"
            )
        self.base = base
        self.first_turns = first_turns
        self.backwards = backwards
        self.model_scaling = RotaryScaling() if model_scaling is None else model_scaling
        self.scaling = PositionScaling()
        for name in ("short_factor", "long_factor"):
            divisors = getattr(self.model_scaling, name)
            if divisors and len(divisors) != self.width // 2:
                raise ValueError(
                    f"rotary_scaling.{name}: found {len(divisors)} numbers, wanted one for each of "
                    f"{self.width // 2} pairs"
                )

    @property
    def depends_on_length(self) -> bool:
        """Whether rates change with the sequence length, which a state cannot follow."""
        return self.scaling.name == "dynamic_ntk" or self.model_scaling.depends_on_length

    @property
    def length_scaling(self) -> str:
        """The scaling for which rates change with the sequence length."""
        is_of_model = self.model_scaling.depends_on_length
        return self.model_scaling.rope_type if is_of_model else self.scaling.name

    def rotated(
        self, x: Float[Tensor, "*#rows K"], cos: Tensor, sin: Tensor
    ) -> Float[Tensor, "*#rows K"]:
        """x, whose coordinates that rotate are rotated by their phases."""
        if self.width == x.shape[-1]:
            return rotate(x, cos, sin)
        first, rest = x.split([self.width, x.shape[-1] - self.width], dim=-1)
        return torch.cat([rotate(first, cos, sin), rest], dim=-1)

    def turns(self, length: int, device: torch.device) -> Float64[Tensor, "J"]:
        """Turns per token of every pair, in a sequence of `length` tokens.

        Sources: linear interpolation, Chen et al. (2023), arXiv:2306.15595; dynamic NTK as in the
        evaluation of CoCA (arXiv:2309.08646), which gives no formula: this is its released code's.
        """
        base, scaling = self.base, self.scaling
        if scaling.name == "dynamic_ntk" and length > scaling.context:
            grown = scaling.factor * length / scaling.context - (scaling.factor - 1)
            base *= grown ** (self.width / max(self.width - 2, 1))
        pairs = torch.arange(self.width // 2, dtype=torch.float64, device=device)
        turns = self.first_turns * base ** (-2 * pairs / self.width)
        turns = self.model_scaling.scaled(turns, base, self.first_turns, length)
        return turns / scaling.factor if scaling.name == "linear" else turns

    def phases(
        self,
        rotation: Float64[Tensor, "B T"],
        length: int,
        dtype: torch.dtype,
        speed: Float64[Tensor, "H J"] | None = None,
    ) -> tuple[Float[Tensor, "B T #H J"], Float[Tensor, "B T #H J"]]:
        """Cosine and sine of mu_t theta_j, or mu_t speed_hj theta_j, in at least float32.

        Both are multiplied by the gain of the model's scaling, if it has one.

        A sum of rates in float32 is wrong by 0.2 rad after a million tokens, and in bf16 by whole
        turns. So the rotation mu_t is float64, and whole turns are removed in float64: the phase is
        accurate to 1e-9 turns. `rotation` holds one number per token, not one per pair.
        """
        rates = self.turns(length, rotation.device)
        if speed is not None:
            rates = rates * speed
        turns = rotation[:, :, None, None] * rates  # (B, T, 1, J) or (B, T, H, J)
        dtype = torch.promote_types(dtype, torch.float32)
        angle = (2 * math.pi) * (turns - turns.detach().floor()).to(dtype)
        cos, sin = angle.cos(), -angle.sin() if self.backwards else angle.sin()
        gain = self.model_scaling.gain
        return (cos, sin) if gain == 1 else (gain * cos, gain * sin)
