"""Checks of the kernels around the op: the cross-entropy and the rotation of pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longhaul.kernels.cross_entropy import cross_entropy_
from longhaul.kernels.rotary import rotate
from longhaul.kernels.verify.cases import Case


@dataclass(frozen=True, kw_only=True)
class LossCase(Case):
    """One call of `cross_entropy_`, with T rows of logits."""

    forms: tuple[str, ...] = ("loss",)
    vocabulary: int = 50_304

    @property
    def gigabytes(self) -> float:
        return 0.6 + 6 * 8 * self.T * self.vocabulary / 1e9

    def inputs(self, device: torch.device) -> dict[str, Tensor]:
        generator = torch.Generator(device).manual_seed(self.T)
        logits = 3 * torch.randn(self.T, self.vocabulary, generator=generator, device=device)
        if self.content == "large":
            logits *= 1e3
        # As in text, a few ids are most of the targets.
        draw = torch.rand(self.T, generator=generator, device=device)
        target = (draw**4 * self.vocabulary).long()
        # The first and the last id, where a mistake in the ends of rows shows.
        target[0], target[-1] = 0, self.vocabulary - 1
        return {"logits": logits.to(self.torch_dtype), "target": target}

    def run(self, inputs: dict[str, Tensor], dtype: torch.dtype, **how: Any) -> dict[str, Tensor]:
        logits = inputs["logits"].to(dtype, copy=True)
        losses = cross_entropy_(
            logits, inputs["target"], with_gradient=True, backend=how["backend"]
        )
        return {"losses": losses, "dlogits": logits}

    def expected(self, inputs: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        logits, target = inputs["logits"].to(dtype).requires_grad_(), inputs["target"]
        losses = torch.nn.functional.cross_entropy(logits, target, reduction="none")
        (gradient,) = torch.autograd.grad(losses.sum(), [logits])
        return {"losses": losses.detach(), "dlogits": gradient}


@dataclass(frozen=True, kw_only=True)
class RotationCase(Case):
    """One call of `rotate`, with phases of each token, or of each token and head."""

    forms: tuple[str, ...] = ("rotation",)
    has_heads_first: bool = False  # and phases of no gradient, shared by the batch
    has_phases_per_head: bool = False

    def inputs(self, device: torch.device) -> dict[str, Tensor]:
        generator = torch.Generator(device).manual_seed(self.T)
        x = torch.randn(self.B, self.T, self.H, 3 * self.K, generator=generator, device=device)
        heads = self.H if self.has_phases_per_head else 1
        batch = 1 if self.has_heads_first else self.B
        angle = torch.randn(batch, self.T, heads, self.K // 2, generator=generator, device=device)
        # Strided, as part of a projection of queries, keys and values.
        x = x.to(self.torch_dtype)[..., : self.K]
        if self.has_heads_first:
            x, angle = x.transpose(1, 2), angle.transpose(1, 2)
        return {"x": x, "cos": angle.cos(), "sin": angle.sin()}

    def run(self, inputs: dict[str, Tensor], dtype: torch.dtype, **how: Any) -> dict[str, Tensor]:
        x, cos, sin = self._leaves(inputs, inputs["x"].dtype, torch.float32)
        return self._results(rotate(x, cos, sin, backend=how["backend"]), x, cos, sin)

    def expected(self, inputs: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        # Phases are float32 whatever the dtype of x is.
        wide = torch.promote_types(dtype, torch.float32)
        x, cos, sin = self._leaves(inputs, dtype, wide)
        first, second = x.to(wide).chunk(2, dim=-1)
        turned = torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)
        return self._results(turned.to(dtype), x, cos, sin)

    def _leaves(
        self, inputs: dict[str, Tensor], dtype: torch.dtype, of_phases: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        x, *phases = (inputs[name].detach() for name in ("x", "cos", "sin"))
        cos, sin = (a.to(of_phases).requires_grad_(not self.has_heads_first) for a in phases)
        return x.to(dtype).requires_grad_(), cos, sin

    def _results(self, y: Tensor, *leaves: Tensor) -> dict[str, Tensor]:
        generator = torch.Generator(y.device).manual_seed(1)
        direction = torch.randn(y.shape, generator=generator, device=y.device)
        # Rounded alike for every dtype, so that its rounding does not add to the error.
        direction = direction.bfloat16().to(y.dtype)
        named = dict(zip(("dx", "dcos", "dsin"), leaves, strict=True))
        wanted = {name: x for name, x in named.items() if x.requires_grad}
        gradients = torch.autograd.grad(y, list(wanted.values()), direction)
        return {"y": y.detach()} | dict(zip(wanted, gradients, strict=True))
