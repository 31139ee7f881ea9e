"""The check of the cross-entropy: losses and the gradient of the logits, against float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longhaul.kernels.cross_entropy import cross_entropy_
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
