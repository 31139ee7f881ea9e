"""Forward and backward passes as custom ops, visible to torch.compile, checkpointing and counters.

The whole op and the state alone have two custom ops each. A schema has no optional results: here an
absent result is an empty tensor of shape (0,); callers and backends use None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    saving,
)
from longhaul.kernels.power.call import Forward, PowerCall, Saved, SavedState
from longhaul.kernels.power.cost import (
    power_backward_flops,
    power_flops,
    power_state_flops,
)
from longhaul.kernels.power.state import PowerState
from longhaul.kernels.power.torch import backend as torch_backend
from longhaul.kernels.shapes import state_features

_OPS = getattr(torch.ops, NAMESPACE)

# Arguments of `power_backward` before the gradients: inputs and results of `power_forward`.
_NUM_SAVED = len(Saved._fields)

_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? log_g, Tensor? kv, Tensor? norm, Tensor? cu_seqlens"
)
_SETTINGS = (
    "int degree, float scale, bool normalize, bool output_final_state, str form, SymInt chunk_size,"
    " bool keeps_states, str backend"
)
_RESULTS = "Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor"
_FORWARD = f"({_INPUTS}, *, {_SETTINGS}) -> ({_RESULTS})"
_BACKWARD = (
    f"({_INPUTS}, Tensor out, Tensor final_kv, Tensor final_norm, Tensor inverse, Tensor is_live,"
    " Tensor chunk_kv, Tensor chunk_norm, Tensor? dout, Tensor? dkv, Tensor? dnorm, *,"
    f" bool[] needs, {_SETTINGS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)

_STATE_INPUTS = "Tensor k, Tensor v, Tensor? log_g, Tensor? kv, Tensor? norm, Tensor? cu_seqlens"
_STATE_SETTINGS = "int degree, int chunk_size, str backend"
_STATE_FORWARD = f"({_STATE_INPUTS}, *, {_STATE_SETTINGS}) -> (Tensor, Tensor)"
_STATE_BACKWARD = (
    f"({_STATE_INPUTS}, Tensor final_kv, Tensor final_norm, Tensor? dkv, Tensor? dnorm, *,"
    f" bool[] needs, {_STATE_SETTINGS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def run(
    call: PowerCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None,
    kv: Tensor | None,
    norm: Tensor | None,
    cu_seqlens: Tensor | None,
    *,
    backend: str,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Output and final state of a call, differentiable."""
    out, final_kv, final_norm, *_ = power_forward(
        q, k, v, log_g, kv, norm, cu_seqlens,
        degree=call.degree,
        scale=call.scale,
        normalize=call.normalize,
        output_final_state=call.output_final_state,
        form=call.form,
        chunk_size=call.chunk_size,
        keeps_states=call.keeps_states and backend == "triton",
        backend=backend,
    )  # fmt: skip
    return (out, final_kv, final_norm) if call.output_final_state else (out, None, None)


def implementation(backend: str) -> ModuleType:
    """The module with a backend's passes."""
    if backend != "triton":
        return torch_backend
    # Triton takes long to import, and may not be installed.
    from longhaul.kernels.power import triton

    return triton


@custom_op("power_forward", _FORWARD)
def power_forward(*inputs: Any, backend: str, **settings: Any) -> tuple[Tensor, ...]:
    """The results of a backend's `forward`: the fields of `Forward`."""
    results: Forward = implementation(backend).forward(PowerCall(**settings), *inputs)
    return tuple(or_empty(x, inputs[0]) for x in results)


@custom_op("power_backward", _BACKWARD)
def power_backward(
    *tensors: Any, needs: list[bool], backend: str, **settings: Any
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, log_g, kv and norm."""
    call = PowerCall(**settings)
    saved = saved_of(call, tensors[:_NUM_SAVED])
    grads = implementation(backend).backward(call, saved, *tensors[_NUM_SAVED:], tuple(needs))
    return in_dtypes_of(tensors[:7], grads, tensors[0])


def saved_of(call: PowerCall, tensors: Sequence[Tensor | None]) -> Saved:
    """What a backend saved, from the arguments of `power_backward`, where absent is empty."""
    saved = Saved(*tensors)  # type: ignore[arg-type]
    if not call.output_final_state:
        saved = saved._replace(final_kv=None, final_norm=None)
    if not call.normalize:
        saved = saved._replace(inverse=None, is_live=None)
    if not call.keeps_states:
        saved = saved._replace(chunk_kv=None, chunk_norm=None)
    return saved


@power_forward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None,
    kv: Tensor | None,
    norm: Tensor | None,
    cu_seqlens: Tensor | None,
    *,
    degree: int,
    normalize: bool,
    output_final_state: bool,
    chunk_size: int,
    keeps_states: bool,
    **_settings: Any,
) -> tuple[Tensor, ...]:
    B, T, H, K = q.shape
    G, V = v.shape[2:]
    like = q.new_empty(0, dtype=torch.promote_types(q.dtype, torch.float32))
    final_kv = final_norm = inverse = is_live = chunk_kv = chunk_norm = None
    # The layout depends on K, so K is a number even where other sizes are symbolic.
    P = state_features(int(K), degree) if output_final_state or keeps_states else 0
    S = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if output_final_state:
        final_kv, final_norm = like.new_empty(S, G, P, V), like.new_empty(S, G, P)
    if normalize:
        inverse, is_live = like.new_empty(B, T, H), like.new_empty(B, T, H, dtype=torch.bool)
    if keeps_states:
        # As cost.py has it, for sizes that may be symbolic.
        num = B * (-(-T // chunk_size)) if cu_seqlens is None else T // chunk_size + S
        # Not of float16: its products have operands of float32.
        chunk_kv = (q if q.dtype == torch.bfloat16 else like).new_empty(num, G, P, V)
        has_norm = normalize or output_final_state
        chunk_norm = like.new_empty((num, G, P) if has_norm else (0,))
    results = Forward(
        q.new_empty(B, T, H, V), final_kv, final_norm, inverse, is_live, chunk_kv, chunk_norm
    )
    return tuple(or_empty(x, q) for x in results)


@power_backward.register_fake
def _(*tensors: Any, needs: list[bool], **_settings: Any) -> tuple[Tensor, ...]:
    return fake_gradients(tensors[:6], needs)


def _backward(
    ctx: Any, dout: Tensor | None, dkv: Tensor | None, dnorm: Tensor | None, *_: None
) -> tuple[Tensor | None, ...]:
    if not ctx.settings["output_final_state"]:
        # torch.compile also passes gradients of absent results.
        dkv = dnorm = None
    needs = list(ctx.needs_input_grad[:6])
    grads = power_backward(*ctx.saved_tensors, dout, dkv, dnorm, needs=needs, **ctx.settings)
    return *(grad if need else None for grad, need in zip(grads, needs, strict=True)), None


# Saved: inputs, output, final state, denominators, perhaps states. Recomputed: the rest.
power_forward.register_autograd(_backward, setup_context=saving(3))


def _flops(
    count: Callable[..., int], q: Tensor, v: Tensor, cu_seqlens: Tensor | None, settings: Any
) -> int:
    sizes = (q.shape[3], v.shape[3], settings["degree"], settings["form"], settings["chunk_size"])
    H, G = q.shape[2], v.shape[2]
    return G * sum(count(T, *sizes, queries=H // G) for T in lengths(q, cu_seqlens))


@register_flop_formula(_OPS.power_forward, get_raw=True)
def _forward_flops(
    q: Tensor, k: Tensor, v: Tensor, *rest: Any, out_val: Any, **settings: Any
) -> int:
    return _flops(power_flops, q, v, rest[3], settings)


@register_flop_formula(_OPS.power_backward, get_raw=True)
def _backward_flops(
    q: Tensor, k: Tensor, v: Tensor, *rest: Any, out_val: Any, **settings: Any
) -> int:
    return _flops(power_backward_flops, q, v, rest[3], settings)


def state_call(degree: int, chunk_size: int) -> PowerCall:
    """The settings of a call that computes only the state."""
    return PowerCall(
        degree=degree, scale=1.0, normalize=False, output_final_state=True,
        form="chunked", chunk_size=chunk_size,
    )  # fmt: skip


@custom_op("power_state", _STATE_FORWARD)
def power_state(*inputs: Any, degree: int, chunk_size: int, backend: str) -> tuple[Tensor, Tensor]:
    """kv and norm after the last token of every sequence."""
    call = state_call(degree, chunk_size)
    state: PowerState = implementation(backend).state_forward(call, *inputs)
    return state.kv, state.norm


@custom_op("power_state_backward", _STATE_BACKWARD)
def power_state_backward(
    *tensors: Any, needs: list[bool], degree: int, chunk_size: int, backend: str
) -> tuple[Tensor, ...]:
    """Gradients of k, v, log_g, kv and norm."""
    call, saved = state_call(degree, chunk_size), SavedState(*tensors[:8])
    grads = implementation(backend).state_backward(call, saved, *tensors[8:])
    wanted = (x if need else None for x, need in zip(grads, needs, strict=True))
    return in_dtypes_of(tensors, wanted, tensors[0])


@power_state.register_fake
def _(
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None,
    kv: Tensor | None,
    norm: Tensor | None,
    cu_seqlens: Tensor | None,
    *,
    degree: int,
    **_settings: Any,
) -> tuple[Tensor, Tensor]:
    B, _, G, K = k.shape
    S = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    P = state_features(int(K), degree)
    like = k.new_empty(0, dtype=torch.promote_types(k.dtype, torch.float32))
    return like.new_empty(S, G, P, v.shape[3]), like.new_empty(S, G, P)


@power_state_backward.register_fake
def _(*tensors: Any, needs: list[bool], **_settings: Any) -> tuple[Tensor, ...]:
    return fake_gradients(tensors[:5], needs)


def _state_backward(
    ctx: Any, dkv: Tensor | None, dnorm: Tensor | None
) -> tuple[Tensor | None, ...]:
    needs = list(ctx.needs_input_grad[:5])
    if dkv is None and dnorm is None:
        return (None,) * 6
    grads = power_state_backward(*ctx.saved_tensors, dkv, dnorm, needs=needs, **ctx.settings)
    return *(grad if need else None for grad, need in zip(grads, needs, strict=True)), None


# Saved: inputs, final state. Recomputed: features. States before chunks are not needed.
power_state.register_autograd(_state_backward, setup_context=saving(2))


@register_flop_formula(_OPS.power_state, get_raw=True)
def _state_flops(k: Tensor, v: Tensor, *rest: Any, out_val: Any, degree: int, **_: Any) -> int:
    sizes = k.shape[3], v.shape[3], degree
    return k.shape[2] * sum(power_state_flops(T, *sizes) for T in lengths(k, rest[3]))


@register_flop_formula(_OPS.power_state_backward, get_raw=True)
def _state_backward_flops(*tensors: Any, out_val: Any, **settings: Any) -> int:
    return 2 * _state_flops(*tensors[:6], out_val=out_val, **settings)
