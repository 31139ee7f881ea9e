"""Custom ops, visible to torch.compile, checkpointing and counters.

A schema has no optional results: here an absent result is an empty tensor of shape (0,).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from hashlib import sha256
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef  # torch has no public name for it yet

# Exported models carry copies of this file. Each copy in a process has ops of its own.
NAMESPACE = "longhaul"
if not __name__.startswith("longhaul."):
    NAMESPACE += "_" + sha256(__name__.encode()).hexdigest()[:16]

CODE: dict[str, Callable[..., Any]] = {}
"""The code of each custom op by its name. On `meta` tensors it makes its usual allocations."""


def custom_op(name: str, schema: str) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Decorator: a custom op of this name in our namespace, which ignores autocast.

    Its first argument is a tensor, on the device of all.
    """

    def define(function: Callable[..., Any]) -> CustomOpDef:
        def run(*tensors: Any, **settings: Any) -> Any:
            # Autocast would turn the matrix products inside into 16-bit ones.
            with without_autocast(tensors[0]):
                return function(*tensors, **settings)

        CODE[f"{NAMESPACE}::{name}"] = run
        return torch.library.custom_op(f"{NAMESPACE}::{name}", run, mutates_args=(), schema=schema)

    return define


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """A context in which products with x have its own precision, also inside of autocast."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def or_empty(x: Tensor | None, like: Tensor) -> Tensor:
    """x, or the empty tensor that stands for an absent result."""
    return like.new_empty(0) if x is None else x


def in_dtypes_of(
    inputs: Iterable[Tensor | None], gradients: Iterable[Tensor | None], like: Tensor
) -> tuple[Tensor, ...]:
    """Each gradient in the dtype of its input: backends compute those of states in float32."""
    return tuple(
        like.new_empty(0) if gradient is None or x is None else gradient.to(x.dtype)
        for x, gradient in zip(inputs, gradients, strict=False)  # cu_seqlens, the last, has none
    )


def fake_gradients(inputs: Sequence[Any], needs: Iterable[bool]) -> tuple[Tensor, ...]:
    """Gradients in the shapes of the inputs that need one, for the tracing of a backward op."""
    return tuple(
        x.new_empty(x.shape) if need and x is not None else inputs[0].new_empty(0)
        for x, need in zip(inputs, needs, strict=True)
    )


def saving(num_differentiable: int) -> Callable[..., None]:
    """A `setup_context` that saves inputs, results and settings for the backward pass.

    Results after the first `num_differentiable` have no gradients.
    """

    def setup_context(
        ctx: Any,
        inputs: tuple[Any, ...],
        keyword_only_inputs: dict[str, Any],
        output: tuple[Any, ...],
    ) -> None:
        ctx.save_for_backward(*inputs, *output)
        ctx.mark_non_differentiable(*output[num_differentiable:])
        ctx.set_materialize_grads(False)
        ctx.settings = keyword_only_inputs

    return setup_context


def lengths(x: Tensor, cu_seqlens: Tensor | None) -> list[int]:
    """Tokens of every sequence. Offsets without values count as documents of equal length."""
    B, T = x.shape[:2]
    if cu_seqlens is None:
        return [T] * B
    if type(cu_seqlens) is Tensor and not cu_seqlens.is_meta:
        return [end - start for start, end in pairwise(cu_seqlens.tolist())]
    N = cu_seqlens.shape[0] - 1
    return [T // N] * N
