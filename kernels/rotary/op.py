"""Rotation of pairs of coordinates by phases that may be learned."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from longhaul.kernels.backend import Backend, uses_triton, why_dtype_unsupported
from longhaul.kernels.rotary import compiled


def rotate(
    x: Float[Tensor, "*#rows K"],
    cos: Float[Tensor, "*#rows J"],
    sin: Float[Tensor, "*#rows J"],
    *,
    backend: Backend = "auto",
) -> Float[Tensor, "*#rows K"]:
    """Rotate each pair (x_j, x_(j + K/2)) by its phase; computed in the dtype of the phases.

    Forward reads x and writes the result; backward reads x and the gradient, and writes that of x
    and, where they are wanted, those of the phases. Separate operations would move ten times as
    much. torch.compile fuses them by itself, and therefore gets the formula.

    CoCA pairs coordinates like this. The conformal-sympow paper pairs neighbours, which differs by
    a permutation of the rows of the projections, and so by nothing that is learned.

    Args:
        x: in any dtype, which is also that of the result.
        cos, sin: of J = K / 2 phases, broadcast to the rows of x.
        backend: "torch", "triton" (where x has four dimensions, and phases are float32) or "auto".

    Raises:
        ValueError: if the phases do not fit x.
    """
    shared = zip(cos.shape[-2::-1], x.shape[-2::-1], strict=False)
    is_shared = cos.ndim <= x.ndim and all(size in (1, rows) for size, rows in shared)
    if not is_shared or cos.shape != sin.shape or 2 * cos.shape[-1] != x.shape[-1]:
        raise ValueError(
            f"phases: found {tuple(cos.shape)} and {tuple(sin.shape)} for x {tuple(x.shape)}, "
            "wanted a phase for each pair, of all rows or shared by some"
        )
    if torch.compiler.is_compiling():
        # The compiler fuses a cast with the halves of `cat` and `chunk`, not with the whole.
        first, second = (half.to(cos.dtype) for half in x.chunk(2, dim=-1))
        turned = first * cos - second * sin, first * sin + second * cos
        return torch.cat([half.to(x.dtype) for half in turned], dim=-1)
    kernels: ModuleType | None = compiled if compiled.serves(x, cos, sin) else None
    if uses_triton(backend, x.device, _why_not(x, cos)):
        # Triton takes long to import, and may not be installed.
        from longhaul.kernels.rotary import triton

        kernels = triton
    result: Tensor = _Rotation.apply(x, cos, sin, kernels)  # type: ignore[no-untyped-call]
    return result


def _why_not(x: Tensor, cos: Tensor) -> str | None:
    """Why the kernels cannot rotate x; None if they can."""
    if not x.ndim == cos.ndim == 4:
        return f"its kernels take four dimensions, found {x.ndim} and {cos.ndim}"
    if cos.dtype != torch.float32:
        return f"its kernels take phases in float32, found {cos.dtype}"
    if all(size < rows for size, rows in zip(cos.shape[1:3], x.shape[1:3], strict=True)):
        return "its kernels take phases that tokens or heads share, not both"
    return why_dtype_unsupported(x.dtype)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, kernels: ModuleType | None
    ) -> Tensor:
        # Only gradients of phases depend on x.
        ctx.save_for_backward(x if any(ctx.needs_input_grad[1:3]) else None, cos, sin)
        ctx.kernels = kernels
        if kernels is not None:
            rotated: Tensor = kernels.rotated(x, cos, sin)
            return rotated
        exact = x.to(cos.dtype)
        turned = torch.empty_like(exact)
        (first, second), (one, two) = exact.chunk(2, dim=-1), turned.chunk(2, dim=-1)
        torch.mul(first, cos, out=one).addcmul_(second, sin, value=-1)
        torch.mul(first, sin, out=two).addcmul_(second, cos)
        return turned.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, cos, sin = ctx.saved_tensors
        needs_phases = any(ctx.needs_input_grad[1:3])
        kernels = ctx.kernels
        if kernels is compiled and not compiled.serves(dy, cos, sin):
            kernels = None  # a negated view, for example
        # Second derivatives take the formulas below, which are differentiable.
        if needs_phases and kernels is not None and not torch.is_grad_enabled():
            return *kernels.gradients(dy, x, cos, sin), None
        dx: Tensor = _Rotation.apply(dy, cos, -sin, kernels)  # type: ignore[no-untyped-call]
        if not needs_phases:
            return dx, None, None, None
        (one, two), (first, second) = (a.to(cos.dtype).chunk(2, dim=-1) for a in (dy, x))
        dcos = (one * first).addcmul(two, second)
        dsin = (two * first).addcmul(one, second, value=-1)
        return dx, dcos.sum_to_size(cos.shape), dsin.sum_to_size(sin.shape), None
