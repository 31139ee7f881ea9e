"""Rotary positions, accurate over a million tokens, and their scaling at evaluation."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor


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


class Rotary:
    """Rotation rates of the width / 2 pairs: theta_j = first base^(-2 (j - 1) / width), j = 1, ...

    The usual embedding has first = 1 radian per token. The symmetric-power papers have first =
    2 pi, and base = N, the length of the longest document. Rates are stored in turns per token.
    `backwards` rotates by the negative of every angle.
    """

    def __init__(
        self,
        width: int,
        *,
        base: float,
        first_turns: float = 1 / (2 * math.pi),
        backwards: bool = False,
    ) -> None:
        if width % 2:
            raise ValueError(f"head width: found {width}, wanted an even one, to rotate pairs")
        self.width = width
        self.base = base
        self.first_turns = first_turns
        self.backwards = backwards
        self.scaling = PositionScaling()

    @property
    def depends_on_length(self) -> bool:
        """Whether rates change with the sequence length, which a state cannot follow."""
        return self.scaling.name == "dynamic_ntk"

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
        return turns / scaling.factor if scaling.name == "linear" else turns

    def phases(
        self,
        rotation: Float64[Tensor, "B T"],
        length: int,
        dtype: torch.dtype,
        speed: Float64[Tensor, "H J"] | None = None,
    ) -> tuple[Float[Tensor, "B T #H J"], Float[Tensor, "B T #H J"]]:
        """Cosine and sine of mu_t theta_j, or mu_t speed_hj theta_j, in at least float32.

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
        return angle.cos(), -angle.sin() if self.backwards else angle.sin()
