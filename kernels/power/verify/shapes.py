"""The calls of power attention that we compile for every chip."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from longhaul.kernels.power.call import PowerCall, Saved
from longhaul.kernels.power.state import PowerState
from longhaul.kernels.shapes import state_features

_CHUNK_SIZE = 128  # tokens


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One call: T is two chunks, B is 2, with 8 query heads or more and 4 key heads.

    Backward passes may split the key heads in two halves. Triton compiles the same kernels for 2 as
    for 4 heads, but others for 1.
    """

    form: Literal["attention", "chunked", "step"]
    degree: int
    K: int
    V: int
    dtype: torch.dtype = torch.bfloat16
    plain: bool = False  # neither gates nor a denominator
    packed: bool = False  # two documents of odd lengths, with initial and final states
    inplace: bool = False  # a step that writes over its state
    has_bfloat16_state: bool = False  # of a step
    heads: int = 8  # query heads

    @property
    def name(self) -> str:
        marks = " plain" * self.plain + " packed" * self.packed + " in place" * self.inplace
        marks += f" H{self.heads}" * (self.heads != 8)
        marks += " bfloat16 state" * self.has_bfloat16_state
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.form} p{self.degree} K{self.K} V{self.V} {dtype}{marks}"

    def launch(self) -> None:
        """Run the launchers with every configuration, on tensors of zeros."""
        # Imported here, as compiling other kernels must work even if these cannot be imported.
        from longhaul.kernels.common.triton.launch import configuration
        from longhaul.kernels.power.triton.tile_sizes import MOST_CANDIDATES

        for index in range(MOST_CANDIDATES):
            with configuration(index):
                launch_once(self)


SHAPES: tuple[Shape, ...] = (
    Shape(form="attention", degree=1, K=64, V=64, plain=True),
    Shape(form="attention", degree=2, K=64, V=64),
    Shape(form="attention", degree=2, K=128, V=128),
    Shape(form="attention", degree=4, K=64, V=64),
    Shape(form="attention", degree=8, K=64, V=64),
    Shape(form="attention", degree=2, K=64, V=64, dtype=torch.float16),
    Shape(form="attention", degree=2, K=64, V=64, dtype=torch.float32),
    Shape(form="attention", degree=2, K=64, V=64, plain=True),
    Shape(form="chunked", degree=1, K=64, V=64),
    Shape(form="chunked", degree=1, K=128, V=128),
    Shape(form="chunked", degree=1, K=256, V=256),
    Shape(form="chunked", degree=2, K=16, V=64),
    Shape(form="chunked", degree=2, K=32, V=64),
    Shape(form="chunked", degree=2, K=64, V=64),
    Shape(form="chunked", degree=2, K=128, V=64),
    Shape(form="chunked", degree=2, K=128, V=128),
    Shape(form="chunked", degree=4, K=16, V=64),
    Shape(form="chunked", degree=4, K=32, V=64),
    Shape(form="chunked", degree=2, K=64, V=64, dtype=torch.float16),
    Shape(form="chunked", degree=2, K=64, V=64, dtype=torch.float32),
    Shape(form="chunked", degree=2, K=64, V=64, plain=True),
    Shape(form="chunked", degree=2, K=64, V=64, heads=4),
    Shape(form="chunked", degree=2, K=64, V=64, packed=True),
    Shape(form="step", degree=1, K=64, V=64),
    Shape(form="step", degree=2, K=64, V=64),
    Shape(form="step", degree=4, K=16, V=64),
    Shape(form="step", degree=2, K=64, V=64, dtype=torch.float16),
    Shape(form="step", degree=2, K=64, V=64, dtype=torch.float32),
    Shape(form="step", degree=1, K=64, V=64, dtype=torch.float32, inplace=True),
    Shape(form="step", degree=1, K=256, V=256, inplace=True),
    Shape(form="step", degree=2, K=64, V=64, inplace=True),
    Shape(form="step", degree=2, K=64, V=64, has_bfloat16_state=True),
    Shape(form="step", degree=2, K=64, V=64, inplace=True, has_bfloat16_state=True),
    Shape(form="step", degree=2, K=128, V=128, inplace=True, heads=32),
    Shape(form="step", degree=4, K=16, V=64, inplace=True),
)


def launch_once(shape: Shape) -> None:
    """Run the launchers of one shape, forward and backward, with the chip's configurations."""
    power = importlib.import_module("longhaul.kernels.power.triton")
    B, T, H, G = 2, 2 * _CHUNK_SIZE, shape.heads, 4
    if shape.packed:
        B, T = 1, T + 1
    P = state_features(shape.K, shape.degree)
    offsets = torch.tensor([0, _CHUNK_SIZE // 2 + 1, T]) if shape.packed else None

    def tokens(*sizes: int) -> Tensor:
        return torch.zeros(*sizes, dtype=shape.dtype)

    if shape.form == "step":
        state = PowerState(torch.zeros(B, G, P, shape.V), torch.zeros(B, G, P))
        power.step(
            state.to_bfloat16() if shape.has_bfloat16_state else state,
            tokens(B, 1, H, shape.K),
            tokens(B, 1, G, shape.K),
            tokens(B, 1, G, shape.V),
            None if shape.plain else torch.zeros(B, 1, G),
            degree=shape.degree,
            scale=shape.K**-0.5,
            normalize=not shape.plain,
            inplace=shape.inplace,
        )
        return
    call = PowerCall(
        degree=shape.degree,
        scale=shape.K**-0.5,
        normalize=not shape.plain,
        output_final_state=shape.packed,
        form=shape.form,
        chunk_size=T if shape.form == "attention" else _CHUNK_SIZE,
        keeps_states=shape.form == "chunked",
    )
    q, k, v = tokens(B, T, H, shape.K), tokens(B, T, G, shape.K), tokens(B, T, G, shape.V)
    log_g = None if shape.plain else torch.zeros(B, T, G)
    # One state for each of the two documents.
    kv = torch.zeros(2, G, P, shape.V) if shape.packed else None
    norm = torch.zeros(2, G, P) if shape.packed else None
    inputs = (q, k, v, log_g, kv, norm)
    after = power.forward(call, *inputs, offsets)
    saved = Saved(*inputs, offsets, *after)
    needs = tuple(x is not None for x in inputs)
    power.backward(call, saved, torch.zeros_like(after.out), after.kv, after.norm, needs)
