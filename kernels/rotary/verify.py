"""What is checked and compiled of the rotation of pairs."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from longhaul.kernels.rotary import rotate
from longhaul.kernels.verify.cases import DTYPES, Case


@dataclass(frozen=True, kw_only=True)
class RotationCase(Case):
    """One call of `rotate`, with phases of each token, or of each token and head."""

    forms: tuple[str, ...] = ("rotation",)
    B: int = 1
    H: int = 4
    K: int = 64
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

    def shrunk(self, tokens: int, width: int) -> Case:
        return replace(self, T=min(self.T, tokens), K=min(self.K, width))


def cases(dtype: str) -> list[Case]:
    """Phases of each token, or of each token and head, in both orders of time and heads."""
    return [
        RotationCase(name="rotation", dtype=dtype),
        RotationCase(name="rotation, odd sizes", dtype=dtype, B=2, T=333, H=3, K=20),
        RotationCase(
            name="rotation, phases per head", dtype=dtype, T=333, has_phases_per_head=True
        ),
        RotationCase(name="rotation, heads first", dtype=dtype, B=2, T=333, has_heads_first=True),
    ]


def _launch(dtype: torch.dtype) -> None:
    triton = importlib.import_module("longhaul.kernels.rotary.triton")
    x = torch.zeros(2, 128, 4, 64, dtype=dtype)
    for heads in (1, 4):
        phase = torch.zeros(2, 128, heads, 32)
        triton.rotated(x, phase, phase)
        triton.gradients(x, x, phase, phase)


# Small calls to compile.
SHAPES = {f"rotation {dtype}": partial(_launch, getattr(torch, dtype)) for dtype in DTYPES}
