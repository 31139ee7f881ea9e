"""Forward and backward passes as custom ops, visible to torch.compile, checkpointing and counters.

A schema has no optional results: here an absent result is an empty tensor of shape (0,); callers
and backends use None.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from longhaul.kernels.common.custom_ops import (
    NAMESPACE,
    custom_op,
    fake_gradients,
    in_dtypes_of,
    lengths,
    or_empty,
)
from longhaul.kernels.delta import torch as torch_backend
from longhaul.kernels.delta.call import DeltaCall, Inputs
from longhaul.kernels.delta.cost import delta_backward_flops, delta_flops

_OPS = getattr(torch.ops, NAMESPACE)

_NUM_INPUTS = len(Inputs._fields)
_INPUTS = (
    "Tensor k, Tensor v, Tensor? q, Tensor? beta, Tensor? log_g, Tensor? state, Tensor? cu_seqlens"
)
_SETTINGS = "float scale, int chunk_size, bool output_final_state, bool keeps_states, str backend"
_FORWARD = f"({_INPUTS}, *, {_SETTINGS}) -> (Tensor, Tensor, Tensor)"
_BACKWARD = (
    f"({_INPUTS}, Tensor kept, Tensor? dout, Tensor? dstate, *, bool[] needs, {_SETTINGS})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def run(call: DeltaCall, inputs: Inputs, backend: str) -> tuple[Tensor, Tensor | None]:
    """Output, empty without queries, and final state of a call, differentiable."""
    settings = vars(call) | {"keeps_states": call.keeps_states and backend == "torch"}
    out, state, _ = delta_forward(*inputs, **settings, backend=backend)
    return out, state if call.output_final_state else None


def implementation(backend: str) -> ModuleType:
    """The module with a backend's passes."""
    if backend != "triton":
        return torch_backend
    # Triton takes long to import, and may not be installed.
    from longhaul.kernels.delta import triton

    return triton


@custom_op("delta_forward", _FORWARD)
def delta_forward(*inputs: Any, backend: str, **settings: Any) -> tuple[Tensor, ...]:
    """Output, final state, and the states that are kept for the backward pass."""
    results = implementation(backend).forward(DeltaCall(**settings), Inputs(*inputs))
    return tuple(or_empty(x, inputs[0]) for x in results)


@custom_op("delta_backward", _BACKWARD)
def delta_backward(
    *tensors: Any, needs: list[bool], backend: str, **settings: Any
) -> tuple[Tensor, ...]:
    """Gradients of k, v, q, beta, log_g and the initial state."""
    inputs, rest = Inputs(*tensors[:_NUM_INPUTS]), tensors[_NUM_INPUTS:]
    grads = implementation(backend).backward(DeltaCall(**settings), inputs, *rest)
    wanted = (x if need else None for x, need in zip(grads, needs, strict=True))
    return in_dtypes_of(inputs, wanted, inputs.k)


@delta_forward.register_fake
def _(*inputs: Any, chunk_size: int, output_final_state: bool, keeps_states: bool, **_: Any) -> Any:
    k, v, q, _beta, _log_g, _state, cu_seqlens = inputs
    (B, T, H, V), K = v.shape, k.shape[3]
    like = k.new_empty(0, dtype=torch.promote_types(k.dtype, torch.float32))
    documents = None if cu_seqlens is None else cu_seqlens.shape[0] - 1
    num = torch_backend.num_kept(T, chunk_size, H, documents)
    return (
        k.new_empty(0 if q is None else v.shape),
        like.new_empty(B if documents is None else documents, H, K, V)
        if output_final_state
        else k.new_empty(0),
        like.new_empty(num, B, H, K, V) if keeps_states else k.new_empty(0),
    )


@delta_backward.register_fake
def _(*tensors: Any, needs: list[bool], **_settings: Any) -> tuple[Tensor, ...]:
    return fake_gradients(tensors[:6], needs)


def _setup_context(
    ctx: Any,
    inputs: tuple[Any, ...],
    keyword_only_inputs: dict[str, Any],
    output: tuple[Tensor, ...],
) -> None:
    # Saved: inputs, and states before groups of chunks. Recomputed: the rest.
    ctx.save_for_backward(*inputs, output[2])
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)
    ctx.settings = keyword_only_inputs


def _backward(
    ctx: Any, dout: Tensor | None, dstate: Tensor | None, _: None
) -> tuple[Tensor | None, ...]:
    if not ctx.settings["output_final_state"]:
        # torch.compile also passes gradients of absent results.
        dstate = None
    needs = list(ctx.needs_input_grad[:6])
    *inputs, kept = ctx.saved_tensors
    if inputs[2] is None:
        dout = None
    grads = delta_backward(*inputs, kept, dout, dstate, needs=needs, **ctx.settings)
    return *(grad if need else None for grad, need in zip(grads, needs, strict=True)), None


delta_forward.register_autograd(_backward, setup_context=_setup_context)


def _flops(count: Callable[..., int], inputs: tuple[Any, ...], chunk_size: int) -> int:
    k, v, _q, beta, *_, cu_seqlens = inputs
    sizes, H = (k.shape[3], v.shape[3], chunk_size), int(v.shape[2])
    erases = beta is not None
    return H * sum(count(T, *sizes, erases=erases) for T in lengths(v, cu_seqlens))


@register_flop_formula(_OPS.delta_forward, get_raw=True)
def _forward_flops(*inputs: Any, out_val: Any, chunk_size: int, **_: Any) -> int:
    return _flops(delta_flops, inputs, chunk_size)


@register_flop_formula(_OPS.delta_backward, get_raw=True)
def _backward_flops(*tensors: Any, out_val: Any, chunk_size: int, **_: Any) -> int:
    return _flops(delta_backward_flops, tensors[:_NUM_INPUTS], chunk_size)
