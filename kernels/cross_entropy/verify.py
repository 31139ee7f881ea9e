"""What is checked and compiled of the cross-entropy."""

from __future__ import annotations

import importlib
import itertools
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
    softcap: float | None = None
    z_loss: float = 0.0

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
        losses, normalizers = cross_entropy_(
            logits,
            inputs["target"],
            with_gradient=True,
            softcap=self.softcap,
            z_loss=self.z_loss,
            backend=how["backend"],
        )
        return {"losses": losses, "normalizers": normalizers, "dlogits": logits}

    def expected(self, inputs: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        logits, target = inputs["logits"].to(dtype).requires_grad_(), inputs["target"]
        cap = self.softcap
        y = logits if cap is None else cap * torch.tanh(logits / cap)
        losses = torch.nn.functional.cross_entropy(y, target, reduction="none")
        normalizers = y.logsumexp(1)
        total = (losses + self.z_loss * normalizers.square()).sum()
        (gradient,) = torch.autograd.grad(total, [logits])
        found = {"losses": losses, "normalizers": normalizers}
        return {name: one.detach() for name, one in found.items()} | {"dlogits": gradient}


def cases(dtype: str) -> list[Case]:
    """Rows of one block of the kernel, and of several."""
    return [
        LossCase(name="loss, GPT-2's ids", dtype=dtype, T=300),
        LossCase(name="loss, 257 ids", dtype=dtype, T=77, vocabulary=257),
        LossCase(name="loss, one row", dtype=dtype, T=1, vocabulary=5001),
        LossCase(name="loss, large logits", dtype=dtype, T=9, vocabulary=4100, content="large"),
        LossCase(name="loss, soft-capped", dtype=dtype, T=9, vocabulary=4100, softcap=5.0),
        LossCase(name="loss with z-loss", dtype=dtype, T=9, vocabulary=4100, z_loss=0.1),
    ]


def _launch(dtype: torch.dtype) -> None:
    triton = importlib.import_module("longhaul.kernels.cross_entropy.triton")
    logits, target = torch.zeros(2, 50_304, dtype=dtype), torch.zeros(2).long()
    for with_gradient, softcap in itertools.product((True, False), (None, 30.0)):
        triton.cross_entropy_(
            logits, target, with_gradient=with_gradient, softcap=softcap, z_loss=0.0
        )


# Small calls to compile.
SHAPES = {f"loss {dtype}": partial(_launch, getattr(torch, dtype)) for dtype in DTYPES}
