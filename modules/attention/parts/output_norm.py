"""The norm of a layer's mixed values, and the gate on them, before the output projection."""

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

_EPS = 1e-5  # in all published layers, whatever the norms of their blocks have
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}


class OutputNorm(nn.Module):
    """w y / sqrt(mean(y^2) + 1e-5), times act(gate); all in at least float32.

    A head is normalised by itself, and all heads share the gain w. `groups` does as Mamba-2: the
    gate comes before the norm, each of so many groups of all channels is normalised by itself, and
    every channel has a gain of its own.
    """

    def __init__(
        self,
        width: int | None,
        *,
        activation: Literal["none", "silu", "sigmoid"] = "none",
        groups: int | None = None,
    ) -> None:
        """width: of the gain, that of a head, or with groups that of all heads; None: no norm."""
        super().__init__()
        self.activation = activation
        self.groups = groups
        self.weight = None if width is None else nn.Parameter(torch.ones(width))

    def forward(
        self, y: Float[Tensor, "B T HV"], gate: Float[Tensor, "B T HV"] | None = None
    ) -> Float[Tensor, "B T HV"]:
        """The mixed values of all heads, in the dtype of the norm's arithmetic."""
        exact = torch.promote_types(y.dtype, torch.float32)
        y = y.to(exact)
        if gate is not None:
            gate = _ACTIVATIONS[self.activation](gate.to(exact))
        if self.weight is not None and self.groups is None:
            y = y.unflatten(-1, (-1, len(self.weight)))
            y = F.rms_norm(y, y.shape[-1:], self.weight.to(exact), _EPS).flatten(2)
        y = y if gate is None else y * gate
        if self.weight is not None and self.groups is not None:
            y = y.unflatten(-1, (self.groups, -1))
            y = F.rms_norm(y, y.shape[-1:], None, _EPS).flatten(2) * self.weight.to(exact)
        return y
