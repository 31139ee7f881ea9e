"""What is checked and compiled of the cross-entropy."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from longhaul.kernels.cross_entropy import cross_entropy_
from longhaul.kernels.verify.cases import DTYPES, Case


@dataclass(frozen=True, kw_only=True)
class LossCase(Case):
    """One call of `cross_entropy_`, with T rows of logits."""

    forms: tuple[str, ...] = ("loss",)
    vocabulary: int = 50_304
    content: str = "normal"  # or "large"

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


def cases(dtype: str) -> list[Case]:
    """Rows of one block of the kernel, and of several."""
    return [
        LossCase(name="loss, GPT-2's ids", dtype=dtype, T=300),
        LossCase(name="loss, 257 ids", dtype=dtype, T=77, vocabulary=257),
        LossCase(name="loss, one row", dtype=dtype, T=1, vocabulary=5001),
        LossCase(name="loss, large logits", dtype=dtype, T=9, vocabulary=4100, content="large"),
    ]


def _launch(dtype: torch.dtype) -> None:
    triton = importlib.import_module("longhaul.kernels.cross_entropy.triton")
    logits = torch.zeros(2, 50_304, dtype=dtype)
    for with_gradient in (True, False):
        triton.cross_entropy_(logits, torch.zeros(2).long(), with_gradient=with_gradient)


# Small calls to compile.
SHAPES = {f"loss {dtype}": partial(_launch, getattr(torch, dtype)) for dtype in DTYPES}
